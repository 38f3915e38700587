#!lua flags=allow-oom
-- Makes a term the current one; the run is not finished any more.
-- KEYS: term, finished
-- ARGV: term, learner

local current = map(redis.call('HGETALL', KEYS[1]))
local term = tonumber(current['term'] or '0')
if term > tonumber(ARGV[1]) or (term == tonumber(ARGV[1]) and (current['learner'] or ARGV[2]) ~= ARGV[2]) then
  return redis.error_reply('FENCED ' .. whole(term) .. ' ' .. (current['learner'] or 'unknown'))
end
redis.call('HSET', KEYS[1], 'term', ARGV[1], 'learner', ARGV[2])
redis.call('DEL', KEYS[2])
return 0
