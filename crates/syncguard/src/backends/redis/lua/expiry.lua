-- Returns the record with a new expiry and every other byte unchanged, or nil. Decoding and encoding
-- would change what other writers wrote: empty lists, long numbers, the order of fields.
local function with_expiry(raw, expires_at)
  local start, stop = string.match(raw, '^{"lockId":"[%w_-]+","expiresAtMs":()%d+(),')
  if not start then
    local depth, at = 0, 1
    while true do
      local _, found, mark = string.find(raw, '(["%[%]{}])', at)
      if not found then
        break
      end
      at = found + 1
      if mark == '"' then
        -- Skip to the end of the string; a character after a backslash does not end it.
        repeat
          local _, last, char = string.find(raw, '([\\"])', at)
          if not last then
            return nil
          end
          at = last + (char == '"' and 1 or 2)
        until char == '"'
        local from, to = string.match(raw, '^%s*:%s*()[%d+%-.eE]+()', at)
        -- A top-level field. If it occurs twice, the last one counts, as in decoding.
        if depth == 1 and from
          and cjson.decode('[' .. string.sub(raw, found, at - 1) .. ']')[1] == 'expiresAtMs' then
          start, stop = from, to
        end
      elseif mark == '{' or mark == '[' then
        depth = depth + 1
      else
        depth = depth - 1
      end
    end
    if not start then
      return nil
    end
  end
  return string.sub(raw, 1, start - 1) .. expires_at .. string.sub(raw, stop)
end

