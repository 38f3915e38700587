#!lua flags=allow-oom
-- Removes collected entries for good. Dead letters stay on their stream, to be read by people.
-- KEYS: term, inflight, scored, dead
-- ARGV: term, group, number of entries, then for each 3 or 4 (its stream's place in KEYS) and its id,
--       then the fields of inflight to remove
-- Doing it again changes nothing.

local refused = fenced(KEYS[1], ARGV[1])
if refused then return refused end
local group, count = ARGV[2], tonumber(ARGV[3])
for i = 4, 2 + 2 * count, 2 do
  if ARGV[i] == '3' then
    remove(KEYS[3], group, ARGV[i + 1])
  else
    redis.call('XACK', KEYS[4], group, ARGV[i + 1])
  end
end
for i = 4 + 2 * count, #ARGV do redis.call('HDEL', KEYS[2], ARGV[i]) end
return 0
