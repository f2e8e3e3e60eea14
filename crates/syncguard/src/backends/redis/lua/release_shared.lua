-- release, for all locks:
-- ARGV[1] tolerance in ms   ARGV[2] prefix of channels   ARGV[3] 'S' on a Cluster, where channels are sharded
-- ARGV[4] lifetime of the marker of an undo in ms
local WIDTH, READ, SHARED, OWN = 2, 2, 4, 3
local dead_before = now_ms() - ARGV[1]

