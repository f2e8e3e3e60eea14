-- cleanup: delete a record that has been dead for long, with its index. Never a fence counter.
-- KEYS[1] lock   KEYS[2] index of the lock id
-- ARGV[1] lock id   ARGV[2] for how long it must have been expired in ms
-- returns 1 deleted, 0 not
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
