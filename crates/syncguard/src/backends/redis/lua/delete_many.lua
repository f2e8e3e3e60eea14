-- Collects what delete_one.lua does at once.
local deleted, channels, ages = {}, {}, {}
local function delete(lock, index, channel, age)
  deleted[#deleted + 1] = lock
  deleted[#deleted + 1] = index
  channels[#channels + 1] = channel
  ages[#ages + 1] = age
end

