-- Deletes a lock that is released, and its index entry, and notifies the waiters. The age of the holder makes
-- waiters of several processes ask in order, by pausing; a single subscriber gets no age and does not pause.
local function delete(lock, index, channel, age)
  redis.call('DEL', unpack({lock, index}))
  -- This comes last and cannot make the release fail: the user may lack permission to publish or to count
  -- subscribers.
  if age ~= '' then
    local subscribers = redis.pcall('PUBSUB', ARGV[3] == 'S' and 'SHARDNUMSUB' or 'NUMSUB', channel)
    if not subscribers.err and subscribers[2] <= 1 then
      age = ''
    end
  end
  redis.pcall(ARGV[3] .. 'PUBLISH', channel, age)
end

