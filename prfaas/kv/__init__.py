"""KV groups, KV kinds and layouts: one definition that index, pool, connector, agent and planner share.

A KV group is plain data (`KVGroup`). The rules of its kind stand in one module of `prfaas.kv.kinds`: which prefix
lengths held blocks can serve, what travels, what may be evicted, how bytes lie, and what the planner counts. The package
is pure and imports only hashes, ids and errors.
"""
