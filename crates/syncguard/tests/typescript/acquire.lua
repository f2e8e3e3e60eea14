-- What the TypeScript implementation does in an acquire, written from its wire format.
-- KEYS lock, index, fence   ARGV lock id, ttl, tolerance, lock key, user key
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local held = redis.call('GET', KEYS[1])
if held and cjson.decode(held).expiresAtMs > now - tonumber(ARGV[3]) then return 0 end
local fence = string.format('%015d', redis.call('INCR', KEYS[3]))
local expires = now + tonumber(ARGV[2])
redis.call('SET', KEYS[1], cjson.encode({lockId = ARGV[1], expiresAtMs = expires,
  acquiredAtMs = now, key = ARGV[5], fence = fence}), 'PX', ARGV[2])
redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[2])
return {1, fence, expires}
