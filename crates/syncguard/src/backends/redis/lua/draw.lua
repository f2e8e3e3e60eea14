-- draw: draw the next fence for a claimed lock.
-- KEYS[1] fence counter   ARGV[1] largest fence
-- returns {1, fence}, {-3} counter is not a number, {-4} counter exhausted
local counter = redis.pcall('INCR', KEYS[1])
if type(counter) ~= 'number' then
  if string.find(counter.err, 'NOPERM', 1, true) then
    return counter
  end
  return {-3}
end
if counter < 1 or counter > tonumber(ARGV[1]) then
  redis.call('DECR', KEYS[1])
  return {counter < 1 and -3 or -4}
end
return {1, string.format('%015d', counter)}
