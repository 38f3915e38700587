#!lua flags=allow-oom
-- Gives entries back unprocessed: claimable at once, and the delivery is not counted.
-- KEYS: lone, then the role's streams
-- ARGV: group, consumer, then pairs of stream index and id
-- Entries that the worker does not own any more are left alone.

local group, consumer = ARGV[1], ARGV[2]
for i = 3, #ARGV, 2 do
  local stream, id = KEYS[1 + ARGV[i]], ARGV[i + 1]
  local deliveries = owned(stream, group, id, consumer)
  if deliveries then
    -- The count decides again, at the next claim, whether the entry runs alone.
    local field = lone_field(stream, id)
    if redis.call('HGET', KEYS[1], field) then redis.call('HSET', KEYS[1], field, 'next') end
    redis.call(
      'XCLAIM', stream, group, HANDED_BACK, 0, id,
      'IDLE', LONG_AGO, 'RETRYCOUNT', math.max(0, deliveries - 1), 'JUSTID'
    )
  end
end
return 0
