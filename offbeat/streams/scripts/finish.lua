#!lua flags=allow-oom
-- Marks the run as finished.
-- KEYS: term, finished
-- ARGV: term

local refused = fenced(KEYS[1], ARGV[1])
if refused then return refused end
redis.call('SET', KEYS[2], '1')
return 0
