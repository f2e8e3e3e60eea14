-- acquire: take the lock if nobody holds it.
-- KEYS[1] lock   KEYS[2] index of the lock id   KEYS[3] fence counter
-- ARGV[1] lock id   ARGV[2] ttl in ms   ARGV[3] tolerance in ms   ARGV[4] storage expiry in ms
-- ARGV[5] user key as JSON   ARGV[6] largest fence
-- returns {0, free in ms} contended, {1, fence, expiry} granted, {2} spent,
--         {-1} foreign record, {-2} index entry in use, {-3} counter is no number, {-4} exhausted
local now = now_ms()
local tolerance = tonumber(ARGV[3])
local raw = redis.call('GET', KEYS[1])
if raw then
  local held = decode(raw)
  if not held then
    return {FOREIGN}
  end
  local is_live = held.expiresAtMs > now - tolerance
  if held.lockId == ARGV[1] then
    if is_live then
      return {1, held.fence, integer(held.expiresAtMs)}
    end
    return {2}
  end
  if is_live then
    return {0, integer(held.expiresAtMs + tolerance - now)}
  end
end
-- An empty entry is the mark of an undo that overtook its acquire.
local index = redis.call('GET', KEYS[2])
if index then
  if index == '' then
    return {2}
  end
  return {-2}
end
-- Checked before anything is written, so that the store ends as it was.
local counter = redis.call('GET', KEYS[3]) or '0'
if not string.match(counter, '^%d+$') then
  return {-3}
end
if #counter > 15 or tonumber(counter) >= tonumber(ARGV[6]) then
  return {-4}
end
local fence = string.format('%015d', redis.call('INCR', KEYS[3]))
local expires = integer(now + tonumber(ARGV[2]))
local record = '{"lockId":"' .. ARGV[1] .. '","expiresAtMs":' .. expires .. ',"acquiredAtMs":'
  .. integer(now) .. ',"key":' .. ARGV[5] .. ',"fence":"' .. fence .. '"}'
redis.call('SET', KEYS[1], record, 'PX', ARGV[4])
redis.call('SET', KEYS[2], KEYS[1], 'PX', ARGV[4])
return {1, fence, expires}
