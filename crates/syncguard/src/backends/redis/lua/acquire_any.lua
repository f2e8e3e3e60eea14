-- acquire_any: take the first of several locks that is free.
-- KEYS[1] index of the lock id   then the lock and the fence counter of each
-- ARGV[1] to ARGV[6] as for acquire   ARGV[7] lock id   ARGV[8] ttl in ms   then the last argument of acquire for each
-- returns {0, ms until the first is free}, {1, fence, expiry, place}, or an error of acquire
local soonest = math.huge
for place = 1, (#KEYS - 1) / 2 do
  local lock = KEYS[2 * place]
  local answer = one(redis.call('GET', lock), lock, KEYS[1], ARGV[7], ARGV[8], ARGV[8 + place], KEYS[2 * place + 1])
  if answer[1] ~= 0 then
    if answer[1] == 1 then
      answer[4] = place
    end
    return answer
  end
  soonest = math.min(soonest, answer[2])
end
return {0, soonest}
