-- Comes before a script that runs on the node that imports its slot. Only the first key is declared;
-- the number of keys and the names of the others come before the arguments.
for place = 2, tonumber(table.remove(ARGV, 1)) do
  KEYS[place] = table.remove(ARGV, 1)
end
local is_asked = true

