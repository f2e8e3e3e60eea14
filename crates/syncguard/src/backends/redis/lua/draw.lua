-- draw: draw the next fence for a claimed lock.
-- KEYS[1] fence counter   ARGV[1] largest fence   ARGV[2] fences per ms of the clock, 0 to count only
-- ARGV[3] least expiry of the counter in ms, 0 for none   ARGV[4] ttl of the lock in ms
-- returns {1, fence}, {-3} counter is not a number, {-4} counter exhausted
local fence, refusal = next_fence(KEYS[1], now_ms(), tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4])
return fence and {1, string.format('%015d', fence)} or refusal
