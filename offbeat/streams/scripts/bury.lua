#!lua flags=allow-oom
-- The learner gives up an entry that it can't read.
-- KEYS: term, stream, dead, lone
-- ARGV: term, group, id, short name of the stream, reason, learner

local refused = fenced(KEYS[1], ARGV[1])
if refused then return refused end
return bury(KEYS[2], ARGV[2], ARGV[3], KEYS[3], KEYS[4], ARGV[4], ARGV[5], ARGV[6], 1)
