-- cleanup: delete a long-dead record and its index entry, never a fence counter.
-- KEYS[1] lock   KEYS[2] index of the lock id
-- ARGV[1] lock id   ARGV[2] minimum time since the expiry in ms
-- returns 1 deleted, 0 not deleted
local raw = redis.call('GET', KEYS[1])
if not raw then
  return 0
end
local held_by, expires = holder(raw)
if held_by ~= ARGV[1] or now_ms() - expires <= tonumber(ARGV[2]) then
  return 0
end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
