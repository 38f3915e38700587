#!lua flags=allow-oom
-- A worker leaves. Its consumer name stays while it holds something: deleting it would make that unclaimable.
-- KEYS: members, info, then the role's streams
-- ARGV: group, consumer

local group, consumer = ARGV[1], ARGV[2]
redis.call('ZREM', KEYS[1], consumer)
redis.call('HDEL', KEYS[2], consumer)
for s = 3, #KEYS do
  local known = redis.pcall('XPENDING', KEYS[s], group)
  if not known.err and held_by(KEYS[s], group, consumer) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[s], group, consumer)
  end
end
return 0
