-- Take or renew the right to write one cluster's record.
-- KEYS: lease, epoch. ARGV: owner, milliseconds.
-- Returns {1, epoch, epoch before} when the owner has it, {0, epoch, other owner} when another has.
-- An owner is "<address> <random>". Whoever listens at the address of the present owner is that owner, started anew.
local function address(owner) return string.match(owner, '^[^ ]*') end
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then
  if address(owner) ~= address(ARGV[1]) then
    return {0, redis.call('HGET', KEYS[1], 'epoch'), owner}
  end
  owner = false
end
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
if owner then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {1, redis.call('HGET', KEYS[1], 'epoch'), tostring(last)}
end
-- Seconds since 1970 keep epochs growing even when Redis has lost its data.
local epoch = math.max(last + 1, tonumber(redis.call('TIME')[1]))
redis.call('SET', KEYS[2], string.format('%d', epoch))
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'epoch', string.format('%d', epoch))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {1, string.format('%d', epoch), string.format('%d', last)}
