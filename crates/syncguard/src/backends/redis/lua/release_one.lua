-- release_one: like release, for a lock whose index entry is on another node while their slot moves.
-- KEYS[1] lock
-- ARGV[1] tolerance in ms   ARGV[2] prefix of channels   ARGV[3] 'S' on a Cluster, where channels are sharded
-- ARGV[4] lock id   ARGV[5] age of the holder in ms, or empty
-- returns 1 released, 0 not found, 2 expired, -1 foreign record
local raw = redis.call('GET', KEYS[1])
if not raw then
  return 0
end
local held_by, expires = holder(raw)
if not held_by then
  return FOREIGN
end
if held_by ~= ARGV[4] then
  return 0
end
if expires <= now_ms() - ARGV[1] then
  return 2
end
delete(KEYS[1], nil, ARGV[2] .. redis.sha1hex(KEYS[1]), ARGV[5])
return 1
