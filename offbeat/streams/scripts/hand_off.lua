#!lua flags=allow-oom
-- Moves an entry on with its result. Whoever comes first wins, so an entry goes on exactly once.
-- KEYS: stream, next stream, lone
-- ARGV: group, id, result, name of the result's field: "p" replaces the payload, "s" goes beside it
-- Returns 1, or 0 when somebody else already did.

local stream, id = KEYS[1], ARGV[2]
local fields = read(stream, id)
if remove(stream, ARGV[1], id) == 0 or not fields then return 0 end
redis.call('HDEL', KEYS[3], lone_field(stream, id))
local first = {ARGV[4], ARGV[3]}
if ARGV[4] ~= 'p' then
  first[3], first[4] = 'p', map(fields)['p']
end
add(KEYS[2], first, fields)
return 1
