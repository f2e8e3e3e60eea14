-- index: write or delete an index entry.
-- KEYS[1] index of the lock id   ARGV[1] entry   ARGV[2] storage expiry in ms, 0 to delete it
if ARGV[2] == '0' then
  return redis.call('DEL', KEYS[1])
end
return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
