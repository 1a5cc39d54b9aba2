-- Set a value that expires, if the writer still has the lease.
-- KEYS: lease, key. ARGV: owner, epoch, value, milliseconds.
local lease = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then
  return redis.error_reply('FENCED another writer has this cluster')
end
return redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
