-- Runs an operation, the function one, for many locks. One that fails does not affect the others.
-- KEYS the WIDTH keys of the first lock, then those of the second, and so on
-- ARGV the SHARED arguments that all locks have in common, then the OWN ones of each lock
-- answers: in the same order; nil for a lock that has to be tried alone, to learn why it failed
local names, answers, lock = {}, {}, 0
for at = READ, #KEYS, WIDTH do
  names[#names + 1] = KEYS[at]
end
-- It reports data of another type as missing. Without permission for it, each lock is tried alone.
local values = redis.pcall('MGET', unpack(names))
if values.err then
  for place = 1, #names do
    answers[place] = false
  end
  return answers
end
local function go_on()
  while lock < #names do
    local key, argument = WIDTH * lock, SHARED + OWN * lock
    lock = lock + 1
    answers[lock] = false
    local answer = one(values[lock], KEYS[key + 1], KEYS[key + 2], ARGV[argument + 1], ARGV[argument + 2],
      ARGV[argument + 3], KEYS[key + 3])
    answers[lock] = not (type(answer) == 'table' and answer.err) and answer
  end
end
repeat
  pcall(go_on)
until lock == #names
