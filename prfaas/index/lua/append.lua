-- Append to a cluster's stream, if the writer still has the lease.
-- KEYS: lease, events. ARGV: owner, epoch, id before the first, then id, data for each entry.
local lease = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then
  return redis.error_reply('FENCED another writer has this cluster')
end
local before = ARGV[3]
for i = 4, #ARGV, 2 do
  redis.call('XADD', KEYS[2], ARGV[i], 'before', before, 'data', ARGV[i + 1])
  before = ARGV[i]
end
return before
