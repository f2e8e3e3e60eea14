-- extend: set the expiry of the lock to now + ttl if this id holds it. Every other byte stays.
-- raw: what is stored at the hinted key   index: the key of the lock id   hint: the hinted lock, or the index again
-- without a hint   lock_id   ttl: in ms
-- returns {1, expiry} extended, {0} not found, {2} expired, {-1} foreign record
local lock, expires, raw = find(lock_id, index, hint, raw)
if lock == FOREIGN then
  return {FOREIGN}
end
if not lock then
  return {0}
end
if expires <= now - ARGV[1] then
  return {2}
end
local record = with_expiry(raw, integer(now + ttl))
if not record then
  return {FOREIGN}
end
local stored_ms = integer(ttl + ARGV[2])
redis.call('SET', lock, record, 'PX', stored_ms)
redis.call('SET', index, lock, 'PX', stored_ms)
return {1, now + ttl}
