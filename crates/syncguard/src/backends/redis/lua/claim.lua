-- claim: take the lock if it is free, without a fence yet. For a lock whose keys are on two nodes
-- while their slot moves; draw and seal follow.
-- KEYS[1] lock
-- ARGV[1] lock id   ARGV[2] ttl in ms   ARGV[3] tolerance in ms   ARGV[4] storage expiry in ms
-- ARGV[5] user key as JSON, then the field holder if any   ARGV[6] index of the lock id   ARGV[7] 1 if it already has an entry
-- returns {0, ms until it is free} contended, {1, fence, expiry} granted, {2} already used,
--         {3} try again, {-1} foreign record, {-2} index entry in use
local now = now_ms()
local raw = redis.call('GET', KEYS[1])
if raw then
  local tolerance = tonumber(ARGV[3])
  local held_by, expires = holder(raw)
  if not held_by then
    return {FOREIGN}
  end
  if expires > now - tolerance then
    if held_by ~= ARGV[1] then
      return {0, integer(expires + tolerance - now)}
    end
    local record = decode(raw)
    return record and {1, record.fence, integer(expires)} or {FOREIGN}
  end
  if held_by == ARGV[1] then
    return {2}
  end
  if not is_asked then
    -- A key cannot be created here while the slot moves away. Once the dead record is deleted, the
    -- next call is redirected to the node that imports the slot.
    redis.call('DEL', KEYS[1])
    return {3}
  end
end
if ARGV[7] == '1' then
  return {-2}
end
if not redis.call('SET', ARGV[6], KEYS[1], 'PX', ARGV[4], 'NX') then
  return {redis.call('GET', ARGV[6]) == '' and 2 or -2}
end
local expires = integer(now + ARGV[2])
redis.call('SET', KEYS[1], '{"lockId":"' .. ARGV[1] .. '","expiresAtMs":' .. expires
  .. ',"acquiredAtMs":' .. integer(now) .. ',"key":' .. ARGV[5] .. ',"fence":"000000000000000"}',
  'PX', ARGV[4])
return {1, '000000000000000', expires}
