-- Before a script at the node that imports its slot: only the first key is declared. The number of
-- all keys and the names of the others come before the arguments.
for place = 2, tonumber(table.remove(ARGV, 1)) do
  KEYS[place] = table.remove(ARGV, 1)
end
local is_asked = true

