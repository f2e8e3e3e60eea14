-- collect_fences: delete the idle counters on one page of names.
-- ARGV[1] cursor of SCAN   ARGV[2] pattern of names   ARGV[3] age in ms   ARGV[4] fences per ms of the clock
-- returns {next cursor, how many were deleted}
local scanned = redis.pcall('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', 1000, 'TYPE', 'string')
if scanned.err then
  -- A missing permission is the only error that SCAN can return here.
  return redis.error_reply('NOPERM deleting counters needs the right to scan')
end
local limit = (now_ms() - ARGV[3]) * ARGV[4]
local deleted = 0
for _, name in ipairs(scanned[2]) do
  -- It fails for a name in a slot that is moving to this node.
  local counter = redis.pcall('GET', name)
  if type(counter) == 'string' and string.find(counter, '^%d+$') and tonumber(counter) < limit then
    deleted = deleted + redis.call('DEL', name)
  end
end
return {scanned[1], deleted}
