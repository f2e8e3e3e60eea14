-- acquire: take the lock if it is free.
-- KEYS[1] lock   KEYS[2] index of the lock id   KEYS[3] fence counter
-- ARGV[1] lock id   ARGV[2] ttl in ms   ARGV[3] tolerance in ms   ARGV[4] storage expiry in ms
-- ARGV[5] user key as JSON, then the field holder if any   ARGV[6] largest fence   ARGV[7] 1 if WAIT follows
-- ARGV[8] fences per ms of the clock, 0 to count only   ARGV[9] expiry of the counter in ms, 0 for none
-- returns {0, ms until it is free} contended, {1, fence, expiry} granted, {2} already used,
--         {-1} foreign record, {-2} index entry in use, {-3} counter is not a number,
--         {-4} counter exhausted
local now = now_ms()
local raw = redis.call('GET', KEYS[1])
if raw then
  local tolerance = tonumber(ARGV[3])
  local held_by, expires = holder(raw)
  if not held_by then
    return {FOREIGN}
  end
  local is_live = expires > now - tolerance
  if held_by == ARGV[1] then
    if is_live then
      local record = decode(raw)
      if not record then
        return {FOREIGN}
      end
      if ARGV[7] == '1' then
        -- From Redis 7.2 on, WAIT covers only the writes of its own connection, so a replay writes
        -- the unchanged record again.
        redis.call('SET', KEYS[1], raw, 'KEEPTTL')
      end
      return {1, record.fence, integer(expires)}
    end
    return {2}
  end
  if is_live then
    return {0, integer(expires + tolerance - now)}
  end
end
if not redis.call('SET', KEYS[2], KEYS[1], 'PX', ARGV[4], 'NX') then
  -- An empty entry is the marker of an undo that overtook its acquire.
  return {redis.call('GET', KEYS[2]) == '' and 2 or -2}
end
local fence, refusal = next_fence(KEYS[3], now, tonumber(ARGV[6]), tonumber(ARGV[8]), tonumber(ARGV[9]))
if not fence then
  -- A failure undoes what the script has written.
  redis.call('DEL', KEYS[2])
  return refusal
end
local expires = integer(now + ARGV[2])
redis.call('SET', KEYS[1], '{"lockId":"' .. ARGV[1] .. '","expiresAtMs":' .. expires
  .. ',"acquiredAtMs":' .. integer(now) .. ',"key":' .. ARGV[5] .. ',"fence":"' .. fence .. '"}',
  'PX', ARGV[4])
return {1, fence, expires}
