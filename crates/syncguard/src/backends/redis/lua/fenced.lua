-- Comes before a script that writes under a lock: refuses it if a later holder has written, and
-- remembers the fence. The last key is the record with the largest fence; the last arguments are the
-- fence, the hash of the lock's key (or empty), and the expiry of the record in ms (0 for none).
do
  local record = table.remove(KEYS)
  local expiry = table.remove(ARGV)
  local lock = table.remove(ARGV)
  local fence = table.remove(ARGV)
  local seen = redis.call('GET', record)
  if seen then
    local largest, other = string.match(seen, '^(%d+) ([%w_-]*)$')
    if not largest then
      return redis.error_reply('FOREIGNFENCE the record of the fence contains other data')
    end
    if lock == '' then
      lock = other
    elseif other ~= '' and other ~= lock then
      return redis.error_reply('OTHERLOCK the fence belongs to another lock')
    end
    if tonumber(largest) > tonumber(fence) then
      return redis.error_reply('STALEFENCE a later holder has written')
    end
  end
  if expiry == '0' then
    redis.call('SET', record, fence .. ' ' .. lock)
  else
    redis.call('SET', record, fence .. ' ' .. lock, 'PX', expiry)
  end
end

