-- release: delete the lock if this id holds it, and notify its waiters.
-- KEYS[1] index of the lock id   KEYS[2] hinted lock, or the index again without a hint
-- ARGV[1] lock id   ARGV[2] tolerance in ms   ARGV[3] lifetime of the undo marker in ms, 0 for none
-- ARGV[4] channel of the hinted lock   ARGV[5] prefix of channels
-- ARGV[6] 'S' on a Cluster, where channels are sharded   ARGV[7] age of the holder in ms, or empty
-- returns 1 released, 0 not found, 2 expired, -1 foreign record
local lock, expires = find(ARGV[1], KEYS[1], KEYS[2])
if lock == FOREIGN then
  return FOREIGN
end
local is_live = lock and expires > now_ms() - ARGV[2]
-- A copy of the acquire that arrives after its undo finds the marker and is refused. The marker
-- overwrites the index entry, because a deleted key cannot be created again while its slot moves
-- away. If the server lacks memory for the marker, the lock is released all the same, but the undo
-- fails.
local marked = ARGV[3] ~= '0' and redis.pcall('SET', KEYS[1], '', 'PX', ARGV[3])
if is_live then
  if marked and not marked.err then
    redis.call('DEL', lock)
  else
    redis.call('DEL', lock, KEYS[1])
  end
  -- This comes last and cannot make the release fail: the user may lack permission to publish.
  local channel = lock == KEYS[2] and ARGV[4] or ARGV[5] .. redis.sha1hex(lock)
  notify(ARGV[6], channel, ARGV[7])
end
if marked and marked.err then
  return marked
end
if is_live then
  return 1
end
return lock and 2 or 0
