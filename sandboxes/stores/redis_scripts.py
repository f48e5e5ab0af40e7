"""What the Redis store does in one step each: Lua scripts, which Redis runs alone. All of a script happens, or nothing.

Above: `stores.redis`. Below: nothing.

KEYS[1] is the prefix of every key; the others are made from it, so a Redis Cluster is not supported.

    newest:KEY           the newest incarnation of a session's key
    session:INCARNATION  hash: v(ersion), w(rite), k(ey), p(rincipal), ph(ase), c(losed at, or empty), d (the record)
    used, open           sorted sets of incarnations, newest use first (the score is negative); `open`: not closed
    closed               sorted set of incarnations by the time they closed
    attempt:KEY\\0ID      hash: i(ncarnation), g (digest), a (registered), e(nded), r(eceipt), o(utcome), x(pruned)
    attempts:KEY, unsettled:KEY   sorted sets of attempt ids, newest first
    of:INCARNATION       set of its attempts, as KEY\\0ID
    outcomes             sorted set of attempts whose texts are kept, by their end
    resources:KEY        hash: resource -> version;   parts:KEY\\0RESOURCE   hash: part -> bytes
    holds:KEY            hash: replica -> a(ttached) or b(usy)
    beat:REPLICA         what it says of itself, for as long as it lives;   replicas   sorted set by the end of that
"""

# A write that was repeated because its answer was lost finds its own mark, and has succeeded.
PUT = r"""
local p, key, inc, expected, write = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local replica = ARGV[10]
if replica ~= '' then
  local held = false
  redis.call('HDEL', p .. 'holds:' .. key, replica)
  local holds = redis.call('HGETALL', p .. 'holds:' .. key)
  for i = 1, #holds, 2 do
    if holds[i + 1] == 'a' and redis.call('EXISTS', p .. 'beat:' .. holds[i]) == 1 then held = true end
  end
  if held then return 'held' end
end
local newest, row = redis.call('GET', p .. 'newest:' .. key), p .. 'session:' .. inc
local version = redis.call('HGET', row, 'v')
if version and redis.call('HGET', row, 'w') == write then return version end
if expected == '' then
  if newest and redis.call('HGET', p .. 'session:' .. newest, 'c') == '' then return 'open' end
  version = 1
else
  if newest ~= inc or version ~= expected then return 'conflict' end
  version = tonumber(expected) + 1
end
redis.call('HSET', row, 'v', version, 'w', write, 'k', key, 'p', ARGV[5], 'ph', ARGV[6], 'c', ARGV[8], 'd', ARGV[9])
redis.call('SET', p .. 'newest:' .. key, inc)
redis.call('ZADD', p .. 'used', ARGV[7], inc)
if ARGV[8] == '' then
  redis.call('ZADD', p .. 'open', ARGV[7], inc)
else
  redis.call('ZREM', p .. 'open', inc)
  redis.call('ZADD', p .. 'closed', ARGV[8], inc)
  for _, name in ipairs(redis.call('HKEYS', p .. 'resources:' .. key)) do
    redis.call('DEL', p .. 'parts:' .. key .. '\0' .. name)
  end
  redis.call('DEL', p .. 'resources:' .. key, p .. 'holds:' .. key)
end
return tostring(version)
"""

GET = r"""
local newest = redis.call('GET', KEYS[1] .. 'newest:' .. ARGV[1])
if not newest then return false end
return redis.call('HMGET', KEYS[1] .. 'session:' .. newest, 'd', 'v')
"""

REGISTER = r"""
local p, key, id = KEYS[1], ARGV[1], ARGV[2]
local row = p .. 'attempt:' .. key .. '\0' .. id
if redis.call('EXISTS', row) == 1 then return redis.call('HMGET', row, 'i', 'g', 'a', 'r', 'o', 'x') end
redis.call('HSET', row, 'i', ARGV[3], 'g', ARGV[4], 'a', ARGV[5])
redis.call('ZADD', p .. 'attempts:' .. key, '-' .. ARGV[5], id)
redis.call('ZADD', p .. 'unsettled:' .. key, '-' .. ARGV[5], id)
redis.call('SADD', p .. 'of:' .. ARGV[3], key .. '\0' .. id)
return false
"""

# ARGV: eight for each attempt.
SETTLE = r"""
local p = KEYS[1]
for i = 1, #ARGV, 8 do
  local key, id, inc, at = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 4]
  local row = p .. 'attempt:' .. key .. '\0' .. id
  if redis.call('EXISTS', row) == 0 then
    redis.call('HSET', row, 'i', inc, 'g', ARGV[i + 3], 'a', at)
    redis.call('ZADD', p .. 'attempts:' .. key, '-' .. at, id)
    redis.call('SADD', p .. 'of:' .. inc, key .. '\0' .. id)
  end
  if redis.call('HEXISTS', row, 'e') == 0 then
    redis.call('HSET', row, 'e', ARGV[i + 5], 'r', ARGV[i + 6], 'o', ARGV[i + 7])
    redis.call('ZREM', p .. 'unsettled:' .. key, id)
    redis.call('ZADD', p .. 'outcomes', ARGV[i + 5], key .. '\0' .. id)
  end
end
return true
"""

# One bounded piece of the work: other clients wait while a script runs. Answers rows, and whether there is more.
PRUNE_CLOSED = r"""
local p, rows = KEYS[1], 0
local found = redis.call('ZRANGEBYSCORE', p .. 'closed', '-inf', '(' .. ARGV[1], 'LIMIT', 0, 20)
for _, inc in ipairs(found) do
  for _, member in ipairs(redis.call('SPOP', p .. 'of:' .. inc, 200)) do
    local split = string.find(member, '\0', 1, true)
    local key, id = string.sub(member, 1, split - 1), string.sub(member, split + 1)
    redis.call('DEL', p .. 'attempt:' .. member)
    redis.call('ZREM', p .. 'attempts:' .. key, id)
    redis.call('ZREM', p .. 'unsettled:' .. key, id)
    redis.call('ZREM', p .. 'outcomes', member)
    rows = rows + 1
  end
  if redis.call('EXISTS', p .. 'of:' .. inc) == 0 then
    local key = redis.call('HGET', p .. 'session:' .. inc, 'k')
    if key and redis.call('GET', p .. 'newest:' .. key) == inc then redis.call('DEL', p .. 'newest:' .. key) end
    redis.call('DEL', p .. 'session:' .. inc)
    redis.call('ZREM', p .. 'closed', inc)
    redis.call('ZREM', p .. 'used', inc)
    rows = rows + 1
  end
end
return {rows, #found}
"""

PRUNE_OUTCOMES = r"""
local p = KEYS[1]
local found = redis.call('ZRANGEBYSCORE', p .. 'outcomes', '-inf', '(' .. ARGV[1], 'LIMIT', 0, 200)
for _, member in ipairs(found) do
  redis.call('HDEL', p .. 'attempt:' .. member, 'o')
  redis.call('HSET', p .. 'attempt:' .. member, 'x', '1')
  redis.call('ZREM', p .. 'outcomes', member)
end
return {#found, #found}
"""

HOLD = r"""
local p, key = KEYS[1], ARGV[1]
if redis.call('GET', p .. 'newest:' .. key) ~= ARGV[2] then return 0 end
local phase = redis.call('HGET', p .. 'session:' .. ARGV[2], 'ph')
if phase == 'closing' or phase == 'closed' then return 0 end
redis.call('HSET', p .. 'holds:' .. key, ARGV[3], ARGV[4])
return 1
"""

HOLDERS = r"""
local p, found = KEYS[1], {}
local holds = redis.call('HGETALL', p .. 'holds:' .. ARGV[1])
for i = 1, #holds, 2 do
  if redis.call('EXISTS', p .. 'beat:' .. holds[i]) == tonumber(ARGV[2]) then
    found[#found + 1] = holds[i]
    found[#found + 1] = holds[i + 1]
  end
end
return found
"""

BEAT = r"""
local p = KEYS[1]
local lived = redis.call('EXISTS', p .. 'beat:' .. ARGV[1])
redis.call('SET', p .. 'beat:' .. ARGV[1], ARGV[3], 'PX', ARGV[2])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZADD', p .. 'replicas', now + tonumber(ARGV[2]), ARGV[1])
redis.call('ZREMRANGEBYSCORE', p .. 'replicas', '-inf', now - 1000)
return lived
"""

REPLICAS = r"""
local p, found = KEYS[1], {}
for _, replica in ipairs(redis.call('ZRANGE', p .. 'replicas', 0, -1)) do
  local said = redis.call('GET', p .. 'beat:' .. replica)
  if said then
    found[#found + 1] = replica
    found[#found + 1] = said
  end
end
return found
"""
