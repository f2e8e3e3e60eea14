-- acquire and acquire_any, for all locks:
-- ARGV[1] tolerance in ms   ARGV[2] largest fence   ARGV[3] fences per ms of the clock, 0 to count only
-- ARGV[4] least expiry of the counter in ms, 0 for none   ARGV[5] how long records outlive the ttl in ms
-- ARGV[6] 1 if WAIT follows
local WIDTH, READ, SHARED, OWN = 3, 1, 6, 3
local now = now_ms()
local tolerance, largest, per_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local last_ttl, expires_at, stored_ms, times

