-- extend, for one lock:
-- KEYS[1] index of the lock id   KEYS[2] hinted lock, or the index again without a hint
-- ARGV[3] lock id   ARGV[4] ttl in ms
local raw, index, hint = redis.pcall('GET', KEYS[2]), KEYS[1], KEYS[2]
local lock_id, ttl = ARGV[3], ARGV[4]

