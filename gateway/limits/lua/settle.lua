-- Corrects windows, frees leases and corrects meters, without asking.
--
-- KEYS: one per window change, then per lease, then per meter change.
-- ARGV: bucket length in ms, number of buckets, meter lifetime in s, number of windows, of leases, of meters;
--       per window change: bucket, delta; per lease: id; per meter change: delta.
-- What has left a window is not given back; what is added counts from now.
local bucket_ms, num_buckets, meter_ttl_s = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local num_windows, num_leases, num_meters = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local now_bucket = math.floor(now_ms / bucket_ms)
local next_key, next_arg = 0, 6

local function key()
  next_key = next_key + 1
  return KEYS[next_key]
end

local function argument()
  next_arg = next_arg + 1
  return ARGV[next_arg]
end

for _ = 1, num_windows do
  local window, bucket, delta = key(), tonumber(argument()), tonumber(argument())
  if delta > 0 then
    prune(window, now_bucket, num_buckets)
    redis.call('HSETNX', window, 'o', now_bucket)
    redis.call('HINCRBY', window, now_bucket, delta)
    redis.call('HINCRBY', window, 't', delta)
    redis.call('PEXPIRE', window, (num_buckets + 1) * bucket_ms)
  else
    -- Absent when it has left the window, or when the server has lost its data.
    local charged = tonumber(redis.call('HGET', window, bucket) or 0)
    local returned = math.min(charged, -delta)
    if returned > 0 then
      redis.call('HINCRBY', window, bucket, -returned)
      redis.call('HINCRBY', window, 't', -returned)
    end
  end
end
for _ = 1, num_leases do
  redis.call('ZREM', key(), argument())
end
for _ = 1, num_meters do
  local meter, delta = key(), tonumber(argument())
  if redis.call('INCRBY', meter, delta) < 0 then
    redis.call('SET', meter, 0)
  end
  redis.call('EXPIRE', meter, meter_ttl_s)
end
return 1
