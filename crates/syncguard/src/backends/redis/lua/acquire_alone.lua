-- acquire, for one lock:
-- KEYS[1] lock   KEYS[2] index of the lock id   KEYS[3] fence counter
-- ARGV[7] lock id   ARGV[8] ttl in ms   ARGV[9] user key as JSON, then the field holder if any
local raw = redis.call('GET', KEYS[1])
local lock, index, counter = KEYS[1], KEYS[2], KEYS[3]
local lock_id, ttl, key = ARGV[7], ARGV[8], ARGV[9]

