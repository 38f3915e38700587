#!lua flags=allow-oom
-- Replaces a collected entry by the next attempt of its ordinal. It frees more than it adds, so a full Redis allows it.
-- KEYS: term, inflight, the entry's stream, the task's stream
-- ARGV: the learner's term, group, id, field of inflight, term, attempt, then field, value, ...
-- Returns 1 when the attempt was issued, 0 when it or a newer one was under way already.

local refused = fenced(KEYS[1], ARGV[1])
if refused then return refused end
remove(KEYS[3], ARGV[2], ARGV[3])
return issue(KEYS[2], KEYS[4], ARGV[4], ARGV[5], ARGV[6], {unpack(ARGV, 7)})
