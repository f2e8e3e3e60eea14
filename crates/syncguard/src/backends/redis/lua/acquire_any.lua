
end
-- acquire_any: take the first of several locks that is free.
-- KEYS[1] index of the lock id   then the locks   then their fence counters
-- ARGV[1] to ARGV[4], ARGV[6] to ARGV[9] as for acquire   ARGV[5] the field holder, if any
-- ARGV[10] on: the user keys as JSON
-- returns {0, ms until the first is free}, {1, fence, expiry, place}, or an error of acquire
local count = (#KEYS - 1) / 2
local soonest
for place = 1, count do
  local arguments = {ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[9 + place] .. ARGV[5], ARGV[6], ARGV[7],
    ARGV[8], ARGV[9]}
  local answer = acquire_one({KEYS[1 + place], KEYS[1], KEYS[1 + count + place]}, arguments)
  if answer[1] ~= 0 then
    if answer[1] == 1 then
      answer[4] = place
    end
    return answer
  end
  soonest = math.min(soonest or math.huge, tonumber(answer[2]))
end
return {0, integer(soonest)}
