if #deleted > 0 then
  redis.call('DEL', unpack(deleted))
  local subscribers = redis.pcall('PUBSUB', ARGV[3] == 'S' and 'SHARDNUMSUB' or 'NUMSUB', unpack(channels))
  for place = 1, #channels do
    local count = subscribers.err and 2 or subscribers[2 * place]
    if count > 0 then
      redis.pcall(ARGV[3] .. 'PUBLISH', channels[place], count > 1 and ages[place] or '')
    end
  end
end
return answers
