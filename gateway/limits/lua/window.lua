-- Put before scripts that change windows. A window is a hash of bucket -> amount with "t", its sum, and "o", a bucket that
-- no charge is older than.

-- Drops what has left the window; returns its sum. Whoever charges a window prunes it first, so that no more
-- than one window of buckets lies between its oldest and its newest charge.
local function prune(window, bucket, num_buckets)
  local oldest = tonumber(redis.call('HGET', window, 'o'))
  if not oldest then
    return 0
  end
  local first_kept = bucket - num_buckets + 1
  if oldest < first_kept then
    local gone = 0
    for expired = oldest, math.min(first_kept - 1, oldest + num_buckets) do
      local amount = redis.call('HGET', window, expired)
      if amount then
        gone = gone + tonumber(amount)
        redis.call('HDEL', window, expired)
      end
    end
    -- Lua writes a negated zero as "-0", which Redis takes for no number.
    if gone > 0 then
      redis.call('HINCRBY', window, 't', -gone)
    end
    redis.call('HSET', window, 'o', first_kept)
  end
  return tonumber(redis.call('HGET', window, 't'))
end

