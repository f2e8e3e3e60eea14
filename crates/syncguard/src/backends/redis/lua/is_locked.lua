-- is_locked: return whether the lock is held. Reads only.
-- KEYS[1] lock   ARGV[1] tolerance in ms
-- returns {1 or 0, ms since the expiry, lock id}, {0} without a record, {-1} foreign record
local raw = redis.call('GET', KEYS[1])
if not raw then
  return {0}
end
local held_by, expires = holder(raw)
if not held_by then
  return {FOREIGN}
end
local expired_ms = now_ms() - expires
return {expired_ms < tonumber(ARGV[1]) and 1 or 0, math.max(0, expired_ms), held_by}
