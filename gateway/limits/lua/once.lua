-- Put before the other scripts: what an operation did is kept under its id, so that it counts once, however often
-- it is sent and however late it arrives.
--
-- KEYS: the operation's record, then the script's own keys, then records that nobody will ask for again.
-- ARGV: lifetime of a record in s, number of records to drop, then the script's own arguments.
local record_ttl_s = tonumber(ARGV[1])
for index = #KEYS - tonumber(ARGV[2]) + 1, #KEYS do
  redis.call('DEL', KEYS[index])
end
local next_key, next_arg = 1, 2

local function key()
  next_key = next_key + 1
  return KEYS[next_key]
end

local function argument()
  next_arg = next_arg + 1
  return ARGV[next_arg]
end

local function number()
  return tonumber(argument())
end

-- A lease is a member of its key's sorted set for each of its slots, the first one under the lease's own id.
local function slot_of(id, slot)
  return slot == 1 and id or id .. ':' .. slot
end

local function recall()
  local known = redis.call('GET', KEYS[1])
  return known and cmsgpack.unpack(known)
end

local function remember(answer)
  redis.call('SET', KEYS[1], cmsgpack.pack(answer), 'EX', record_ttl_s)
  return answer
end

