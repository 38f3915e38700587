#!lua flags=allow-oom
-- What is in flight and really there. The two differ when an entry was deleted by hand, or was settled by a learner whose
-- checkpoint a later one does not have.
-- KEYS: inflight, dead, then the other streams that an ordinal passes
-- ARGV: group of the dead stream
-- Returns {ordinal, "term:attempt", ...}.

local CHUNK = 64
local there = {}
local function note(fields)
  local told = map(fields)
  there[(told['o'] or '') .. ':' .. (told['a'] or '')] = told['k'] ~= '2'
end

for s = 3, #KEYS do
  local after = '-'
  repeat
    local entries = redis.call('XRANGE', KEYS[s], after, '+', 'COUNT', CHUNK)
    for _, entry in ipairs(entries) do note(entry[2]) end
    after = #entries > 0 and '(' .. entries[#entries][1]
  until #entries < CHUNK
end
-- Dead letters stay for ever; those that the learner has not settled are pending, or not delivered yet.
local group = {}
for _, row in ipairs(redis.pcall('XINFO', 'GROUPS', KEYS[2])) do
  if map(row)['name'] == ARGV[1] then group = map(row) end
end
for _, row in ipairs(redis.pcall('XPENDING', KEYS[2], ARGV[1], '-', '+', 10000)) do
  local fields = read(KEYS[2], row[1])
  if fields then note(fields) end
end
local last = group['last-delivered-id'] or '0-0'
for _, entry in ipairs(redis.call('XRANGE', KEYS[2], '(' .. last, '+')) do note(entry[2]) end

local found, held = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #held, 2 do
  local attempt = string.match(held[i + 1], ':(%d+)$')
  if there[held[i] .. ':' .. attempt] then
    found[#found + 1] = held[i]
    found[#found + 1] = held[i + 1]
  end
end
return found
