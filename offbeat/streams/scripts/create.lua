#!lua flags=allow-oom
-- Creates the streams and their consumer groups, from the first entry on. Only the learner does.
-- KEYS: streams
-- ARGV: the group of each
-- Returns how many were missing.

local missing = 0
for i = 1, #KEYS do
  local reply = redis.pcall('XGROUP', 'CREATE', KEYS[i], ARGV[i], '0', 'MKSTREAM')
  if not reply.err then
    missing = missing + 1
  elseif not string.find(reply.err, 'BUSYGROUP') then
    return reply
  end
end
return missing
