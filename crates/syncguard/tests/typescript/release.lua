-- What the TypeScript implementation does in a release, written from its wire format.
-- KEYS index   ARGV lock id, tolerance
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local lock = redis.call('GET', KEYS[1])
if not lock then return -1 end
local raw = redis.call('GET', lock)
if not raw then return -1 end
local record = cjson.decode(raw)
if record.expiresAtMs <= now - tonumber(ARGV[2]) then
  redis.call('DEL', lock, KEYS[1])
  return -2
end
if record.lockId ~= ARGV[1] then return 0 end
redis.call('DEL', lock, KEYS[1])
return 1
