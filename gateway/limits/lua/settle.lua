-- Corrects windows, frees leases and corrects meters, without asking.
--
-- KEYS (after those of once.lua): one per window change, then per lease, then per meter change.
-- ARGV: bucket length in ms, number of buckets, meter lifetime in s, number of windows, of leases, of meters;
--       per window change: bucket, delta; per lease: id, slots; per meter change: delta.
-- What has left a window is not given back; what is added counts from now.
if recall() then
  return 0
end
local bucket_ms, num_buckets, meter_ttl_s = number(), number(), number()
local num_windows, num_leases, num_meters = number(), number(), number()
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local now_bucket = math.floor(now_ms / bucket_ms)

for _ = 1, num_windows do
  local window, bucket, delta = key(), number(), number()
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
  local lease, id, slots = key(), argument(), number()
  for slot = 1, slots do
    redis.call('ZREM', lease, slot_of(id, slot))
  end
end
for _ = 1, num_meters do
  local meter, delta = key(), number()
  if redis.call('INCRBY', meter, delta) < 0 then
    redis.call('SET', meter, 0)
  end
  redis.call('EXPIRE', meter, meter_ttl_s)
end
remember({ 1 })
return 1
