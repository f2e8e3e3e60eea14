-- release: delete the lock if this id holds it, and wake who waits for it.
-- KEYS[1] index of the lock id   KEYS[2] lock, as hinted; the index again without a hint
-- ARGV[1] lock id   ARGV[2] tolerance in ms   ARGV[3] life of an undo's mark in ms, 0 for none
-- ARGV[4] channel of the hinted lock   ARGV[5] what channels begin with
-- ARGV[6] command that publishes
-- returns 1 released, 0 not found, 2 expired, -1 foreign record
local lock, expires = find(ARGV[1], KEYS[1], KEYS[2])
if lock == FOREIGN then
  return FOREIGN
end
local is_live = lock and expires > now_ms() - ARGV[2]
-- A copy of the acquire that arrives after its undo finds the mark and is refused. The mark takes
-- the entry's place: a slot that moves away lets nobody create what was just deleted. Without a
-- mark, for lack of memory, the lock is free all the same, but the undo is not done.
local marked = ARGV[3] ~= '0' and redis.pcall('SET', KEYS[1], '', 'PX', ARGV[3])
if is_live then
  if marked and not marked.err then
    redis.call('DEL', lock)
  else
    redis.call('DEL', lock, KEYS[1])
  end
  -- The last thing, and it cannot fail the release: a user may lack the right to publish.
  local channel = lock == KEYS[2] and ARGV[4] or ARGV[5] .. redis.sha1hex(lock)
  redis.pcall(ARGV[6], channel, '')
end
if marked and marked.err then
  return marked
end
if is_live then
  return 1
end
return lock and 2 or 0
