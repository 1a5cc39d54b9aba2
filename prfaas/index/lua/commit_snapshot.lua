-- Make a written snapshot the current one, and drop what it replaces.
-- KEYS: lease, snapshot, events, new chunks, old chunks. ARGV: owner, epoch, stream id that it covers, generation.
local lease = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then
  return redis.error_reply('FENCED another writer has this cluster')
end
redis.call('PERSIST', KEYS[4])
redis.call('HSET', KEYS[2], 'covers', ARGV[3], 'generation', ARGV[4])
if KEYS[5] ~= KEYS[4] then
  redis.call('DEL', KEYS[5])
end
return redis.call('XTRIM', KEYS[3], 'MINID', ARGV[3])
