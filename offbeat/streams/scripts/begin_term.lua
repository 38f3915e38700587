#!lua flags=allow-oom
-- Makes a term the current one; the run is not finished any more, and nobody waits for the evaluations of earlier terms.
-- KEYS: term, finished, inflight, evaluations, lone
-- ARGV: term, learner, group of the evaluations

local current = map(redis.call('HGETALL', KEYS[1]))
local term = tonumber(current['term'] or '0')
if term > tonumber(ARGV[1]) or (term == tonumber(ARGV[1]) and (current['learner'] or ARGV[2]) ~= ARGV[2]) then
  return redis.error_reply('FENCED ' .. whole(term) .. ' ' .. (current['learner'] or 'unknown'))
end
redis.call('HSET', KEYS[1], 'term', ARGV[1], 'learner', ARGV[2])
redis.call('DEL', KEYS[2])

if term == tonumber(ARGV[1]) then return 0 end
for _, entry in ipairs(redis.call('XRANGE', KEYS[4], '-', '+')) do
  redis.pcall('XACK', KEYS[4], ARGV[3], entry[1])
  redis.call('XDEL', KEYS[4], entry[1])
  redis.call('HDEL', KEYS[5], lone_field(KEYS[4], entry[1]))
end
for _, field in ipairs(redis.call('HKEYS', KEYS[3])) do
  if not string.find(field, '^%d+$') then redis.call('HDEL', KEYS[3], field) end
end
return 0
