-- list: return one page of the live locks. Reads only. Skips everything else whose name matches: dead
-- locks, fence counters, index entries and foreign data.
-- ARGV[1] cursor of SCAN   ARGV[2] pattern of names   ARGV[3] tolerance in ms
-- returns {next cursor, record, record, …}
local scanned = redis.pcall('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', 1000, 'TYPE', 'string')
if scanned.err then
  -- A missing permission is the only error that SCAN can return here.
  return redis.error_reply('NOPERM listing needs the right to scan')
end
local found = {scanned[1]}
local now = now_ms()
for _, name in ipairs(scanned[2]) do
  -- It fails for a name in a slot that is moving to this node.
  local raw = redis.pcall('GET', name)
  if type(raw) == 'string' and string.sub(raw, 1, 1) == '{' then
    local held_by, expires = holder(raw)
    if held_by and expires > now - ARGV[3] then
      found[#found + 1] = raw
    end
  end
end
return found
