-- Runs an operation, the function one(KEYS, ARGV), for many locks. One that fails does not affect the others.
-- KEYS the keys of the first lock, then those of the second, and so on
-- ARGV[1] number of keys per lock   ARGV[2] for each argument of the operation: 's' if all locks share it,
-- 'o' if each has its own   then the shared arguments, then those of the first lock, and so on
-- returns the answers in the same order; nil for a lock that has to be tried alone, to learn why it failed
local now = now_ms()
now_ms = function()
  return now
end
local width, at = tonumber(ARGV[1]), 3
local keys, arguments, own, answers = {}, {}, {}, {}
for place = 1, #ARGV[2] do
  if string.byte(ARGV[2], place) == 115 then
    arguments[place] = ARGV[at]
    at = at + 1
  else
    own[#own + 1] = place
  end
end
for lock = 1, #KEYS / width do
  for place = 1, width do
    keys[place] = KEYS[(lock - 1) * width + place]
  end
  for place = 1, #own do
    arguments[own[place]] = ARGV[at]
    at = at + 1
  end
  local ok, answer = pcall(one, keys, arguments)
  answers[lock] = ok and not (type(answer) == 'table' and answer.err) and answer
end
return answers
