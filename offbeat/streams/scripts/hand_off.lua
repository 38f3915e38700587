#!lua flags=allow-oom
-- Moves entries on with their results. Whoever comes first wins, so an entry goes on exactly once.
-- KEYS: next stream, lone, then the role's streams
-- ARGV: group, name of the result's field ("p" replaces the payload, "s" goes beside it),
--       then for each entry: stream index, id, result
-- Returns for each entry 1, or 0 when somebody else already did.

local group, name = ARGV[1], ARGV[2]
local moved = {}

local function move(stream, id, result)
  local fields = read(stream, id)
  if remove(stream, group, id) == 0 or not fields then return 0 end
  redis.call('HDEL', KEYS[2], lone_field(stream, id))
  local first = {name, result}
  if name ~= 'p' then
    first[3], first[4] = 'p', map(fields)['p']
  end
  add(KEYS[1], first, fields)
  return 1
end

for i = 3, #ARGV, 3 do
  moved[#moved + 1] = move(KEYS[2 + ARGV[i]], ARGV[i + 1], ARGV[i + 2])
end
return moved
