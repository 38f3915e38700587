-- What the other scripts share: put in front of each of them when it is loaded (offbeat/streams/link.py).
-- Semantics of Redis 7.0, which are Valkey's too. Keys come in KEYS only, so that a cluster can check the slot.

-- Owner of entries that were given back. It never lives, so they are claimable at once.
local HANDED_BACK = 'handed-back'
-- An idle time longer than any minimum, for entries that were given back. Milliseconds.
local LONG_AGO = 86400000

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function whole(number)
  return string.format('%.0f', number)
end

-- {field, value, ...} -> {field = value}
local function map(list)
  local found = {}
  for i = 1, #list, 2 do found[list[i]] = list[i + 1] end
  return found
end

-- Of the fields of an entry those that its record is made of: all that a reader needs, and a third of what it would parse.
local function payloads(fields)
  local found = {}
  for i = 1, #fields, 2 do
    if fields[i] == 'p' or fields[i] == 's' then
      found[#found + 1] = fields[i]
      found[#found + 1] = fields[i + 1]
    end
  end
  return found
end

-- The {field, value, ...} list of one entry, or nil.
local function read(stream, id)
  local entries = redis.call('XRANGE', stream, id, id)
  return entries[1] and entries[1][2]
end

-- How often the entry was delivered when `consumer` owns it, or nil.
local function owned(stream, group, id, consumer)
  local pending = redis.pcall('XPENDING', stream, group, id, id, 1, consumer)
  if pending.err or not pending[1] then return nil end
  return tonumber(pending[1][4])
end

-- Number of entries that `consumer` holds.
local function held_by(stream, group, consumer)
  local summary = redis.pcall('XPENDING', stream, group)
  for _, row in ipairs(not summary.err and summary[4] or {}) do
    if row[1] == consumer then return tonumber(row[2]) end
  end
  return 0
end

local function lone_field(stream, id)
  return stream .. '|' .. id
end

-- Adds an entry: `first` fields, then the fields of `source` that are not payloads.
local function add(stream, first, source)
  for i = 1, #source, 2 do
    if source[i] ~= 'p' and source[i] ~= 's' then
      first[#first + 1] = source[i]
      first[#first + 1] = source[i + 1]
    end
  end
  return redis.call('XADD', stream, '*', unpack(first))
end

-- Takes an entry off its stream: 1 for whoever comes first, whoever owns it. Everything that forwards starts here.
local function remove(stream, group, id)
  local first = redis.call('XACK', stream, group, id)
  if first == 1 then redis.call('XDEL', stream, id) end
  return first
end

-- Moves an entry to the dead stream. `name` is the stream's short name.
local function bury(stream, group, id, dead, lone, name, reason, worker, deliveries)
  local fields = read(stream, id)
  redis.call('HDEL', lone, lone_field(stream, id))
  if remove(stream, group, id) == 0 or not fields then return 0 end
  local first = {
    'p', map(fields)['p'] or '', 'from', name, 'reason', reason, 'worker', worker,
    'n', deliveries, 'at', whole(now_ms()),
  }
  add(dead, first, fields)
  return 1
end

-- Notes that somebody works on the run, and returns whether entries of silent workers may be claimed. When nobody at
-- all was heard of for `gap_ms`, Redis or the way to it was away, not a worker: for one idle time after that, nobody is
-- taken for dead. Redis must tell, not the caller: a command that waited in the buffer of a frozen server is late, too.
local function may_claim(awake, now, gap_ms, min_idle)
  local state = map(redis.call('HGETALL', awake))
  local since = tonumber(state['since'] or '0')
  if now - tonumber(state['seen'] or '0') > tonumber(gap_ms) then since = now end
  redis.call('HSET', awake, 'seen', whole(now), 'since', whole(since))
  return now - since >= tonumber(min_idle)
end

-- An error once a newer learner has begun; nil otherwise. A Redis that was emptied learns the term again.
local function fenced(key, term)
  local current = tonumber(redis.call('HGET', key, 'term') or '0')
  if current > tonumber(term) then
    return redis.error_reply('FENCED ' .. whole(current))
  end
  if current < tonumber(term) then redis.call('HSET', key, 'term', term) end
  return nil
end

-- Issues a task unless the same or a newer attempt is under way. `fields` is {field, value, ...}. Returns 1 or 0.
local function issue(inflight, stream, field, term, attempt, fields)
  local current = redis.call('HGET', inflight, field)
  if current then
    local t, a = string.match(current, '^(%d+):(%d+)$')
    t, a = tonumber(t), tonumber(a)
    if t > tonumber(term) or (t == tonumber(term) and a >= tonumber(attempt)) then return 0 end
  end
  redis.call('XADD', stream, '*', unpack(fields))
  redis.call('HSET', inflight, field, term .. ':' .. attempt)
  return 1
end

-- Id of the newest entry ever added, so that a reader can wait for the next one.
local function newest(stream)
  local info = redis.pcall('XINFO', 'STREAM', stream)
  if info.err then return '0-0' end
  return map(info)['last-generated-id']
end
