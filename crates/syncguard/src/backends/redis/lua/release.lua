-- release: delete the lock if this id holds it, and notify its waiters.
-- raw: what is stored at the hinted key   index: the key of the lock id   hint: the hinted lock, or the index again
-- without a hint   lock_id   channel: that of the hinted lock   age: that of the holder in ms, empty, or 'undo'
-- returns 1 released, 0 not found, 2 expired, -1 foreign record
local lock, expires = find(lock_id, index, hint, raw)
if lock == FOREIGN then
  return FOREIGN
end
-- A copy of the acquire that arrives after its undo finds the marker and is refused. The marker
-- overwrites the index entry, because a deleted key cannot be created again while its slot moves
-- away. If the server lacks memory for the marker, the lock is released all the same, but the undo
-- fails.
local marked = age == 'undo' and redis.pcall('SET', index, '', 'PX', ARGV[4])
local is_live = lock and expires > dead_before
if is_live then
  if lock ~= hint then
    channel = ARGV[2] .. redis.sha1hex(lock)
  end
  delete(lock, (not marked or marked.err) and index or nil, channel, age == 'undo' and '' or age)
end
if marked and marked.err then
  return marked
end
if is_live then
  return 1
end
return lock and 2 or 0
