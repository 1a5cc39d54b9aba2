-- Entries of a cluster's stream after an id, until they have so many bytes or are so many.
-- KEYS: events. ARGV: id, bytes, entries.
local found, bytes, position = {}, 0, ARGV[1]
repeat
  local some = redis.call('XRANGE', KEYS[1], '(' .. position, '+', 'COUNT', 8)
  for _, entry in ipairs(some) do
    found[#found + 1] = entry
    bytes = bytes + #entry[2][4]
    position = entry[1]
  end
until #some < 8 or bytes >= tonumber(ARGV[2]) or #found >= tonumber(ARGV[3])
return found
