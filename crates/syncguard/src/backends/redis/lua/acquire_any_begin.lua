-- acquire_any, the part before acquire.lua, which becomes a function of its keys and arguments.
local function acquire_one(KEYS, ARGV)
