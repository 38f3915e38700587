#!lua flags=allow-oom
-- An entry could not be processed: it runs alone next time, or is dead when it did already or the failure is final.
-- KEYS: stream, dead, lone
-- ARGV: group, consumer, id, short name of the stream, reason, final (1 or 0)
-- Returns 1 when the entry is dead now, else 0. Nothing happens when the worker does not own it any more.

local stream, dead, lone = KEYS[1], KEYS[2], KEYS[3]
local group, consumer, id = ARGV[1], ARGV[2], ARGV[3]
local deliveries = owned(stream, group, id, consumer)
if not deliveries then return 0 end
local field = lone_field(stream, id)
local alone = redis.call('HGET', lone, field) == 'now:' .. consumer
if alone or ARGV[6] == '1' then
  return bury(stream, group, id, dead, lone, ARGV[4], ARGV[5], consumer, deliveries)
end
redis.call('HSET', lone, field, 'next')
redis.call('XCLAIM', stream, group, HANDED_BACK, 0, id, 'IDLE', LONG_AGO, 'JUSTID')
return 0
