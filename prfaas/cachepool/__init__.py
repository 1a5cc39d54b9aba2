"""The pool: a node's KV blocks in shared memory and on its SSD, with leases, eviction and tenants' limits.

Its main types are `Arena` and `FileArena` (memory and files of equal slots), `SlotPool` (all arenas of one tier under a
byte budget) and `SsdTier`. It may import `prfaas.kv` and lower packages.
"""
