-- Finds the lock that an id holds, dead or alive, at the hinted key or by the index. Returns its name,
-- expiry and record; nil if the id holds no lock; FOREIGN if the value is not a record.
-- raw: what is stored at the hinted key. Data of another type is not this lock.
local function find(lock_id, index, hint, raw)
  if hint ~= index and type(raw) == 'string' then
    local held_by, expires = holder(raw)
    if held_by == lock_id then
      return hint, expires, raw
    end
  end
  local lock = redis.call('GET', index)
  if not lock or lock == '' then
    return nil
  end
  raw = redis.call('GET', lock)
  if not raw then
    if is_asked and lock ~= hint then
      -- It may still be on the node that the slot comes from.
      error(redis.error_reply('TRYAGAIN the lock is on its way'))
    end
    return nil
  end
  local held_by, expires = holder(raw)
  if not held_by then
    return FOREIGN
  end
  if held_by ~= lock_id then
    return nil
  end
  return lock, expires, raw
end

