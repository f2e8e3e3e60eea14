-- extend: set the expiry of the lock to now + ttl if this id holds it. Every other byte stays.
-- KEYS[1] index of the lock id   KEYS[2] hinted lock, or the index again without a hint
-- ARGV[1] lock id   ARGV[2] tolerance in ms   ARGV[3] ttl in ms   ARGV[4] storage expiry in ms
-- returns {1, expiry} extended, {0} not found, {2} expired, {-1} foreign record
local lock, expires, raw = find(ARGV[1], KEYS[1], KEYS[2])
if lock == FOREIGN then
  return {FOREIGN}
end
if not lock then
  return {0}
end
local now = now_ms()
if expires <= now - ARGV[2] then
  return {2}
end
local expires_at = integer(now + ARGV[3])
local record = with_expiry(raw, expires_at)
if not record then
  return {FOREIGN}
end
redis.call('SET', lock, record, 'PX', ARGV[4])
redis.call('SET', KEYS[1], lock, 'PX', ARGV[4])
return {1, expires_at}
