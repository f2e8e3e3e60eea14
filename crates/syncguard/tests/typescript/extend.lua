-- What the TypeScript implementation does in an extend, written from its wire format.
-- KEYS index   ARGV lock id, tolerance, ttl
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local lock = redis.call('GET', KEYS[1])
local raw = lock and redis.call('GET', lock)
if not raw then return 0 end
local record = cjson.decode(raw)
if record.expiresAtMs <= now - tonumber(ARGV[2]) or record.lockId ~= ARGV[1] then return 0 end
record.expiresAtMs = now + tonumber(ARGV[3])
redis.call('SET', lock, cjson.encode(record), 'PX', ARGV[3])
redis.call('SET', KEYS[1], lock, 'PX', ARGV[3])
return {1, record.expiresAtMs}
