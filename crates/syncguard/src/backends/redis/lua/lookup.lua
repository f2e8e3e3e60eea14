-- lookup: return the record of a live lock, by its key or by a lock id. Reads only.
-- KEYS[1] lock, or index of the lock id   ARGV[1] tolerance in ms   ARGV[2] lock id, or empty
-- returns the record, nil, or -1 for a foreign record
local raw
if ARGV[2] == '' then
  raw = redis.call('GET', KEYS[1])
else
  local lock = redis.call('GET', KEYS[1])
  raw = lock and lock ~= '' and redis.call('GET', lock)
end
if not raw then
  return nil
end
local held_by, expires = holder(raw)
if not held_by then
  return FOREIGN
end
if (ARGV[2] ~= '' and held_by ~= ARGV[2]) or expires <= now_ms() - ARGV[1] then
  return nil
end
return raw
