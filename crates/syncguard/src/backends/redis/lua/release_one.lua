-- release_one: like release, for a lock whose index entry is on another node while their slot moves.
-- KEYS[1] lock
-- ARGV[1] lock id   ARGV[2] tolerance in ms   ARGV[3] prefix of channels
-- ARGV[4] 'S' on a Cluster, where channels are sharded   ARGV[5] age of the holder in ms, or empty
-- returns 1 released, 0 not found, 2 expired, -1 foreign record
local raw = redis.call('GET', KEYS[1])
if not raw then
  return 0
end
local held_by, expires = holder(raw)
if not held_by then
  return FOREIGN
end
if held_by ~= ARGV[1] then
  return 0
end
if expires <= now_ms() - ARGV[2] then
  return 2
end
redis.call('DEL', KEYS[1])
notify(ARGV[4], ARGV[3] .. redis.sha1hex(KEYS[1]), ARGV[5])
return 1
