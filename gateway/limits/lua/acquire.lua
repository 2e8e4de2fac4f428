-- Charges windows, leases and meters together, or nothing. Time is the server's: gateways need no common clock.
--
-- KEYS (after those of once.lua): windows that counted the request before, then one per window, per lease, per meter.
-- ARGV: bucket length in ms, number of buckets, lease lifetime in ms, meter lifetime in s,
--       number of windows, of leases, of meters, 1 if nothing is to be charged that was not charged before,
--       number of windows that counted the request, and the ms since it came: a lease that refuses gives 1 back to each;
--       per window: limit, amount; per lease: limit, id, slots; per meter: limit, base, unit cost, units.
-- Returns {1, bucket, window sums..., granted units..., meter sums...}
--      or {0, kind (1 window, 2 lease, 3 meter), index from 0, used, ms to wait or -1}.
local bucket_ms, num_buckets, lease_ttl_ms, meter_ttl_s = number(), number(), number(), number()
local num_windows, num_leases, num_meters, is_taken_back = number(), number(), number(), number() == 1
local num_counted, age_ms = number(), number()
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local bucket = math.floor(now_ms / bucket_ms)

local known = recall()
if known then
  return known
end
if is_taken_back then
  return remember({ 0, 1, 0, 0, -1 })
end

local function wait_ms(window, used, limit, amount)
  if amount > limit then
    return -1
  end
  local excess = used + amount - limit
  for charged = bucket - num_buckets + 1, bucket do
    excess = excess - tonumber(redis.call('HGET', window, charged) or 0)
    if excess <= 0 then
      return math.max(1, (charged + num_buckets) * bucket_ms - now_ms)
    end
  end
  return -1
end

-- It was counted since it came: never in a bucket before the one that is found, so no 60 s hold too many.
local function uncount(window)
  for charged = math.max(bucket - num_buckets + 1, math.floor((now_ms - age_ms) / bucket_ms)), bucket do
    if tonumber(redis.call('HGET', window, charged) or 0) > 0 then
      redis.call('HINCRBY', window, charged, -1)
      redis.call('HINCRBY', window, 't', -1)
      return
    end
  end
end

local counted, windows, leases, meters = {}, {}, {}, {}
for index = 1, num_counted do
  counted[index] = key()
end
for index = 1, num_windows do
  local window = { key = key(), limit = number(), amount = number() }
  window.used = prune(window.key, bucket, num_buckets)
  if window.used + window.amount > window.limit then
    return { 0, 1, index - 1, window.used, wait_ms(window.key, window.used, window.limit, window.amount) }
  end
  windows[index] = window
end
for index = 1, num_leases do
  local lease = { key = key(), limit = number(), id = argument(), slots = number() }
  redis.call('ZREMRANGEBYSCORE', lease.key, '-inf', now_ms)
  local held = redis.call('ZCARD', lease.key)
  if held + lease.slots > lease.limit then
    for _, window in ipairs(counted) do
      uncount(window)
    end
    return remember({ 0, 2, index - 1, held, -1 })
  end
  leases[index] = lease
end
for index = 1, num_meters do
  local meter = { key = key(), limit = number(), base = number(), unit_cost = number(), units = number() }
  meter.used = tonumber(redis.call('GET', meter.key) or 0)
  local least = meter.base
  if meter.units > 0 then
    least = least + meter.unit_cost
  end
  if meter.used + least > meter.limit or meter.used >= meter.limit then
    return { 0, 3, index - 1, meter.used, -1 }
  end
  if meter.unit_cost > 0 then
    meter.units = math.min(meter.units, math.floor((meter.limit - meter.used - meter.base) / meter.unit_cost))
  end
  meters[index] = meter
end

local answer = { 1, bucket }
for _, window in ipairs(windows) do
  redis.call('HSETNX', window.key, 'o', bucket)
  redis.call('HINCRBY', window.key, bucket, window.amount)
  answer[#answer + 1] = redis.call('HINCRBY', window.key, 't', window.amount)
  redis.call('PEXPIRE', window.key, (num_buckets + 1) * bucket_ms)
end
for _, lease in ipairs(leases) do
  for slot = 1, lease.slots do
    redis.call('ZADD', lease.key, now_ms + lease_ttl_ms, slot_of(lease.id, slot))
  end
  redis.call('PEXPIRE', lease.key, lease_ttl_ms)
end
for _, meter in ipairs(meters) do
  answer[#answer + 1] = meter.units
end
for _, meter in ipairs(meters) do
  answer[#answer + 1] = redis.call('INCRBY', meter.key, meter.base + meter.units * meter.unit_cost)
  redis.call('EXPIRE', meter.key, meter_ttl_s)
end
return remember(answer)
