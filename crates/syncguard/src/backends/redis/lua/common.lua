-- What all scripts share. A record is JSON with at least lockId (string) and expiresAtMs (number);
-- whatever else is at a lock's key is foreign, is never overwritten, and answers FOREIGN.
local FOREIGN = -1

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function decode(raw)
  local ok, record = pcall(cjson.decode, raw)
  if ok and type(record) == 'table' and type(record.lockId) == 'string'
    and type(record.expiresAtMs) == 'number' then
    return record
  end
  return nil
end

local function integer(number)
  return string.format('%.0f', number)
end

-- The lock key and record that a lock id holds, dead or alive: at the hinted key, or by the index.
-- Answers nil when it holds none, and FOREIGN when what is there is no record.
local function find(lock_id, index, hint)
  if hint ~= index then
    local raw = redis.call('GET', hint)
    local record = raw and decode(raw)
    if record and record.lockId == lock_id then
      return hint, record
    end
  end
  local lock = redis.call('GET', index)
  if not lock or lock == '' then
    return nil
  end
  local raw = redis.call('GET', lock)
  if not raw then
    return nil
  end
  local record = decode(raw)
  if not record then
    return FOREIGN
  end
  if record.lockId ~= lock_id then
    return nil
  end
  return lock, record
end

