-- shards: remember the number of shards, unless one is remembered.
-- KEYS[1] record of the number   ARGV[1] number
-- returns the number that is remembered
redis.call('SET', KEYS[1], ARGV[1], 'NX')
return redis.call('GET', KEYS[1])
