-- Shared by all scripts. A record is JSON with at least lockId (string) and expiresAtMs (number).
-- Anything else at a lock's key is foreign: scripts never overwrite it and return FOREIGN.
local FOREIGN = -1

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function integer(number)
  return string.format('%.0f', number)
end

local function decode(raw)
  local ok, record = pcall(cjson.decode, raw)
  if ok and type(record) == 'table' and type(record.lockId) == 'string'
    and type(record.expiresAtMs) == 'number' then
    return record
  end
  return nil
end

-- Returns the lock id and the expiry of a record, or nil. A record that acquire wrote begins with
-- both and needs no decoding.
local function holder(raw)
  local lock_id, expires = string.match(raw, '^{"lockId":"([%w_-]+)","expiresAtMs":(%d+),')
  if lock_id then
    return lock_id, tonumber(expires)
  end
  local record = decode(raw)
  if record then
    return record.lockId, record.expiresAtMs
  end
  return nil
end
