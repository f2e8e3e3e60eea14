-- acquire: take the lock if it is free.
-- raw: the record of the lock, if any   lock, index, counter: the keys   lock_id   ttl: in ms
-- key: user key as JSON, then the field holder if any
-- returns {0, ms until it is free} contended, {1, fence, expiry} granted, {2} already used,
--         {-1} foreign record, {-2} index entry in use, {-3} counter is not a number,
--         {-4} counter exhausted
if raw then
  local held_by, expires = holder(raw)
  if not held_by then
    return {FOREIGN}
  end
  local is_live = expires > now - tolerance
  if held_by == lock_id then
    if is_live then
      local record = decode(raw)
      if not record then
        return {FOREIGN}
      end
      if ARGV[6] == '1' then
        -- From Redis 7.2 on, WAIT covers only the writes of its own connection, so a replay writes
        -- the unchanged record again.
        redis.call('SET', lock, raw, 'KEEPTTL')
      end
      return {1, record.fence, expires}
    end
    return {2}
  end
  if is_live then
    return {0, expires + tolerance - now}
  end
end
if ttl ~= last_ttl then
  last_ttl, expires_at, stored_ms = ttl, now + ttl, integer(ttl + ARGV[5])
  times = '","expiresAtMs":' .. integer(expires_at) .. ',"acquiredAtMs":' .. integer(now) .. ',"key":'
end
if not redis.call('SET', index, lock, 'PX', stored_ms, 'NX') then
  -- An empty entry is the marker of an undo that overtook its acquire.
  return {redis.call('GET', index) == '' and 2 or -2}
end
local fence, refusal = next_fence(counter, now, largest, per_ms, ARGV[4], ttl)
if not fence then
  -- A failure undoes what the script has written.
  redis.call('DEL', index)
  return refusal
end
local record = '{"lockId":"' .. lock_id .. times .. key .. ',"fence":"' .. string.format('%015d', fence) .. '"}'
if not redis.call('SET', lock, record, 'PX', stored_ms, raw and 'XX' or 'NX') then
  -- Data of another type. Reading it fails with the error to report.
  redis.call('DEL', index)
  redis.call('DECR', counter)
  redis.call('GET', lock)
  return {FOREIGN}
end
return {1, fence, expires_at}
