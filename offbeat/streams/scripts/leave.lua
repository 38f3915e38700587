#!lua flags=allow-oom
-- A worker leaves. Its name stays while it holds something, since deleting it would make that unclaimable; then it goes
-- as the names of the dead do (see `beat`).
-- KEYS: members, info, then the role's streams
-- ARGV: group, consumer
-- Returns how much it still holds.

local group, consumer = ARGV[1], ARGV[2]
local held = 0
for s = 3, #KEYS do held = held + held_by(KEYS[s], group, consumer) end
if held > 0 then return held end
redis.call('ZREM', KEYS[1], consumer)
redis.call('HDEL', KEYS[2], consumer)
for s = 3, #KEYS do redis.pcall('XGROUP', 'DELCONSUMER', KEYS[s], group, consumer) end
return 0
