-- Give the right to write back. KEYS: lease. ARGV: owner.
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
