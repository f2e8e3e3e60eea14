-- extend_one: like extend, for a lock whose index entry is on another node while their slot moves.
-- KEYS[1] lock
-- ARGV[1] lock id   ARGV[2] tolerance in ms   ARGV[3] ttl in ms   ARGV[4] storage expiry in ms
-- returns {1, expiry} extended, {0} not found, {2} expired, {-1} foreign record
local raw = redis.call('GET', KEYS[1])
if not raw then
  return {0}
end
local held_by, expires = holder(raw)
if not held_by then
  return {FOREIGN}
end
if held_by ~= ARGV[1] then
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
redis.call('SET', KEYS[1], record, 'PX', ARGV[4])
return {1, expires_at}
