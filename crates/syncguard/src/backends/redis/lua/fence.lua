-- Draws the next fence: the counter's next number or the clock, whichever is larger.
-- per_ms: fences per millisecond of the clock, 0 to count only
-- kept_ms: least expiry of the counter, which only one that the clock replaces may have
-- ttl_ms: that of the lock, which the counter outlives
-- Returns the fence. If there is none, returns nil and the reply to the caller, and writes nothing.
local function next_fence(counter, now, largest, per_ms, kept_ms, ttl_ms)
  local floor = now * per_ms
  if floor > largest then
    return nil, {-4}
  end
  local fence = redis.pcall('INCR', counter)
  if type(fence) ~= 'number' then
    return nil, string.find(fence.err, 'NOPERM', 1, true) and fence or {-3}
  end
  if fence < 1 or fence > largest then
    redis.call('DECR', counter)
    return nil, {fence < 1 and -3 or -4}
  end
  if per_ms > 0 then
    fence = math.max(fence, floor)
    redis.call('SET', counter, integer(fence), 'PX', integer(math.max(kept_ms, 2 * ttl_ms)))
  elseif fence >= 1e13 then
    -- Only a clock raises a counter this far, and such a counter may still have an expiry.
    local persisted = redis.pcall('PERSIST', counter)
    if type(persisted) == 'table' then
      redis.call('DECR', counter)
      return nil, persisted
    end
  end
  return fence
end

