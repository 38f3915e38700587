#!lua flags=allow-oom
-- Raises the high-water mark of the versions, never lowers it.
-- KEYS: version
-- ARGV: version
-- Returns the mark.

local mark = tonumber(redis.call('GET', KEYS[1]) or '0')
if tonumber(ARGV[1]) > mark then
  redis.call('SET', KEYS[1], ARGV[1])
  return ARGV[1]
end
return whole(mark)
