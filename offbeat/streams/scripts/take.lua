#!lua flags=allow-oom
-- A worker takes entries: its fair share of what there is, those of dead workers first.
-- KEYS: members, lone, dead, awake, then the streams in order of priority
-- ARGV: group, consumer, limit, held version (or -1: not gated), minimum idle ms, whether the caller would claim (1 or 0),
--       gap ms (see `may_claim`), number of streams, their short names ...,
--       then lone_field of each entry that the process knows it holds
-- Returns {entries, newest id of each stream, number of entries in the streams that it could not take};
-- an entry is {stream index, id, deliveries, 1 when alone, payload fields}.

local members, lone, dead = KEYS[1], KEYS[2], KEYS[3]
local group, consumer, limit, held_version = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local min_idle, count = tonumber(ARGV[5]), tonumber(ARGV[8])
local names, known = {}, {}
for i = 1, count do names[i] = ARGV[8 + i] end
for i = 9 + count, #ARGV do known[ARGV[i]] = true end

local now = now_ms()
local claims_allowed = may_claim(KEYS[4], now, ARGV[7], min_idle) and ARGV[6] == '1'
redis.call('ZADD', members, whole(now), consumer)

-- What the process gave up or never got does not count as held, or it would bar the worker until somebody claims it.
local total, held = 0, 0
for s = 1, count do
  local stream = KEYS[4 + s]
  total = total + redis.call('XLEN', stream)
  for _, row in ipairs(redis.call('XPENDING', stream, group, '-', '+', 10000, consumer)) do
    if known[lone_field(stream, row[1])] then held = held + 1 end
  end
end

-- At least 1 for a worker with empty hands: shares are rounded up.
local alive = redis.call('ZCOUNT', members, '(' .. whole(now - min_idle), '+inf')
local room = math.min(limit, math.max(1, math.ceil(total / alive)) - held)

local found = {}
local function deliver(s, id, deliveries, alone, fields)
  found[#found + 1] = {s, id, deliveries, alone, payloads(fields)}
  room = room - 1
end

-- Entries that were given back and, when claims are allowed, entries whose owner is silent. Not those that the process
-- believes it holds: when it was robbed of one, it must learn that from its next heartbeat first.
local function candidates(stream)
  local rows = {}
  local function append(pending)
    for _, row in ipairs(pending) do
      if not known[lone_field(stream, row[1])] then rows[#rows + 1] = row end
    end
  end
  -- Entries that were given back are idle, too: claims cover them.
  if claims_allowed then
    append(redis.call('XPENDING', stream, group, 'IDLE', min_idle, '-', '+', 100))
  else
    append(redis.call('XPENDING', stream, group, '-', '+', 100, HANDED_BACK))
  end
  return rows
end

-- Changes the owner; the delivery is counted. The state of "alone" is written before the worker knows of the entry.
local function claim(s, row, alone)
  local stream, id = KEYS[4 + s], row[1]
  local entry = redis.call('XCLAIM', stream, group, consumer, 0, id)[1]
  if not entry then return end
  if alone == 1 then redis.call('HSET', lone, lone_field(stream, id), 'now:' .. consumer) end
  deliver(s, id, row[4] + 1, alone, entry[2])
end

-- Splits the candidates into those that may run beside others and those that must not; buries what died alone.
local function sort(s)
  local stream, normal, single = KEYS[4 + s], {}, {}
  for _, row in ipairs(candidates(stream)) do
    local state = redis.call('HGET', lone, lone_field(stream, row[1])) or ''
    if string.sub(state, 1, 4) == 'now:' and row[2] ~= HANDED_BACK then
      local reason = 'its worker died or hung while it processed nothing else (delivery ' .. row[4] .. ')'
      bury(stream, group, row[1], dead, lone, names[s], reason, row[2], row[4])
    elseif state == 'next' or row[4] + 1 >= 3 then
      single[#single + 1] = row
    else
      normal[#normal + 1] = row
    end
  end
  return normal, single
end

-- How many of the next `room` undelivered entries the held version may start: those in front of the first that waits.
local function admissible(stream)
  if held_version < 0 then return room end
  local last = '0-0'
  for _, row in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local info = map(row)
    if info['name'] == group then last = info['last-delivered-id'] end
  end
  local count = 0
  for _, entry in ipairs(redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', room)) do
    if tonumber(map(entry[2])['v'] or '0') > held_version then break end
    count = count + 1
  end
  return count
end

local function take()
  local normal = {}
  for s = 1, count do
    local single
    normal[s], single = sort(s)
    if next(known) == nil and #found == 0 and single[1] then claim(s, single[1], 1) end
    if #found > 0 then return end
  end
  for s = 1, count do
    local stream = KEYS[4 + s]
    for _, row in ipairs(normal[s]) do
      if room > 0 then claim(s, row, 0) end
    end
    local new = room > 0 and admissible(stream) or 0
    if new > 0 then
      local reply = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', new, 'STREAMS', stream, '>')
      for _, entry in ipairs(reply and reply[1][2] or {}) do deliver(s, entry[1], 1, 0, entry[2]) end
    end
  end
end

if room > 0 then take() end

local ids = {}
for s = 1, count do ids[s] = newest(KEYS[4 + s]) end
return {found, ids, total - held - #found}
