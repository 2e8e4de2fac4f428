-- Lets meters hold at least what is known to have been used. KEYS: meters. ARGV: lifetime in s, then one sum each.
for index, meter in ipairs(KEYS) do
  if tonumber(redis.call('GET', meter) or 0) < tonumber(ARGV[index + 1]) then
    redis.call('SET', meter, ARGV[index + 1], 'EX', ARGV[1])
  end
end
return 1
