-- seal: write the fence into a claimed lock. It was drawn while the lock was claimed, so it is larger
-- than every earlier one.
-- KEYS[1] lock   ARGV[1] lock id   ARGV[2] tolerance in ms   ARGV[3] fence
-- returns {1, fence, expiry} granted, {2} already used
local raw = redis.call('GET', KEYS[1])
local held_by, expires = nil, nil
if raw then
  held_by, expires = holder(raw)
end
if held_by ~= ARGV[1] or expires <= now_ms() - ARGV[2] then
  return {2}
end
local sealed, count = string.gsub(raw, '"fence":"0+"}$', '"fence":"' .. ARGV[3] .. '"}')
if count == 0 then
  -- Another copy of the request has already sealed it.
  return {1, decode(raw).fence, integer(expires)}
end
redis.call('SET', KEYS[1], sealed, 'KEEPTTL')
return {1, ARGV[3], integer(expires)}
