#!lua flags=allow-oom
-- A worker tells that it lives and which entries it works on.
-- KEYS: members, info, awake, then the role's streams
-- ARGV: group, consumer, announcement (JSON), ms after which a silent worker is forgotten, see `may_claim`: gap ms,
--       minimum idle ms, then pairs of stream index and id
-- Returns those of the pairs, by position from 1, that the worker does not own any more.

local members, info = KEYS[1], KEYS[2]
local group, consumer, forget_ms = ARGV[1], ARGV[2], tonumber(ARGV[4])
local now = now_ms()
may_claim(KEYS[3], now, ARGV[5], ARGV[6])
redis.call('ZADD', members, whole(now), consumer)
redis.call('HSET', info, consumer, ARGV[3])

local lost = {}
for i = 7, #ARGV, 2 do
  local stream, id = KEYS[3 + ARGV[i]], ARGV[i + 1]
  if owned(stream, group, id, consumer) then
    -- A claim by the owner resets the idle time; JUSTID leaves the count of deliveries alone.
    redis.call('XCLAIM', stream, group, consumer, 0, id, 'JUSTID')
  else
    lost[#lost + 1] = (i - 5) / 2
  end
end

-- Names of the dead go once they hold nothing; deleting one earlier would make its entries unclaimable.
for _, name in ipairs(redis.call('ZRANGEBYSCORE', members, '-inf', whole(now - forget_ms), 'LIMIT', 0, 10)) do
  local held = 0
  for s = 4, #KEYS do
    local summary = redis.pcall('XPENDING', KEYS[s], group)
    for _, row in ipairs(summary.err and {} or summary[4] or {}) do
      if row[1] == name then held = held + row[2] end
    end
  end
  if held == 0 then
    for s = 4, #KEYS do redis.pcall('XGROUP', 'DELCONSUMER', KEYS[s], group, name) end
    redis.call('ZREM', members, name)
    redis.call('HDEL', info, name)
  end
end
return lost
