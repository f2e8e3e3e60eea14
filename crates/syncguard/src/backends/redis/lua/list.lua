-- list: some of the live locks. Reads only. What is not a record of a live lock is left out: fence
-- counters, index entries, and whatever else has a name that begins like ours.
-- ARGV[1] cursor of SCAN   ARGV[2] pattern of names   ARGV[3] tolerance in ms
-- returns {next cursor, record, record, …}
local scanned = redis.pcall('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', 200, 'TYPE', 'string')
if scanned.err then
  -- Nothing else can go wrong with it.
  return redis.error_reply('NOPERM listing needs the right to scan')
end
local found = {scanned[1]}
local now = now_ms()
for _, name in ipairs(scanned[2]) do
  local raw = redis.call('GET', name)
  if raw and string.sub(raw, 1, 1) == '{' then
    local held_by, expires = holder(raw)
    if held_by and expires > now - ARGV[3] then
      found[#found + 1] = raw
    end
  end
end
return found
