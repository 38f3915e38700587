#!lua
-- Issues tasks that are not under way. Without allow-oom: a full Redis refuses this script, and this one only.
-- KEYS: term, inflight, prompts, evaluations
-- ARGV: the learner's term, then for each task: 3 or 4 (its stream's place in KEYS), field of inflight, term, attempt,
--       number of arguments that follow, field, value, ...
-- Returns how many were issued.

local refused = fenced(KEYS[1], ARGV[1])
if refused then return refused end
local issued, i = 0, 2
while i <= #ARGV do
  local last = i + 4 + tonumber(ARGV[i + 4])
  local fields = {unpack(ARGV, i + 5, last)}
  issued = issued + issue(KEYS[2], KEYS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], fields)
  i = last + 1
end
return issued
