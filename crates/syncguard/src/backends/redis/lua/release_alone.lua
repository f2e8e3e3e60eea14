-- release, for one lock:
-- KEYS[1] index of the lock id   KEYS[2] hinted lock, or the index again without a hint
-- ARGV[5] lock id   ARGV[6] channel of the hinted lock   ARGV[7] age of the holder in ms, empty, or 'undo'
local raw, index, hint = redis.pcall('GET', KEYS[2]), KEYS[1], KEYS[2]
local lock_id, channel, age = ARGV[5], ARGV[6], ARGV[7]

