#!lua flags=allow-oom
-- The learner collects: first what earlier terms had collected and not settled, then what is new.
-- KEYS: term, awake, then the streams: scored, dead
-- ARGV: term, group, consumer, limit, gap ms (see `may_claim`)
-- Returns {entries, newest id of each stream}; an entry is {stream index, id, fields}: of a scored
-- group those of its payload, of a dead letter all.

local refused = fenced(KEYS[1], ARGV[1])
if refused then return refused end
may_claim(KEYS[2], now_ms(), ARGV[5], 0)
local group, consumer, room = ARGV[2], ARGV[3], tonumber(ARGV[4])
local found = {}
local function deliver(s, entry)
  found[#found + 1] = {s, entry[1], s == 1 and payloads(entry[2]) or entry[2]}
  room = room - 1
end

for s = 1, #KEYS - 2 do
  local stream = KEYS[2 + s]
  for _, owner in ipairs(redis.call('XPENDING', stream, group)[4] or {}) do
    local rows = {}
    if owner[1] ~= consumer and room > 0 then
      rows = redis.call('XPENDING', stream, group, '-', '+', room, owner[1])
    end
    for _, row in ipairs(rows) do
      local entry = redis.call('XCLAIM', stream, group, consumer, 0, row[1])[1]
      if entry then deliver(s, entry) end
    end
    -- All of it was claimed: the name of the earlier term is not needed any more.
    if owner[1] ~= consumer and #rows == tonumber(owner[2]) then
      redis.call('XGROUP', 'DELCONSUMER', stream, group, owner[1])
    end
  end
end
for s = 1, #KEYS - 2 do
  if room > 0 then
    local reply = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', room, 'STREAMS', KEYS[2 + s], '>')
    for _, entry in ipairs(reply and reply[1][2] or {}) do deliver(s, entry) end
  end
end

local ids = {}
for s = 1, #KEYS - 2 do ids[s] = newest(KEYS[2 + s]) end
return {found, ids}
