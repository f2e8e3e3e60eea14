-- extend, for all locks:
-- ARGV[1] tolerance in ms   ARGV[2] how long records outlive the ttl in ms
local WIDTH, READ, SHARED, OWN = 2, 2, 2, 2
local now = now_ms()

