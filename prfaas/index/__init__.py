"""The index: which prefix is cached on which node of which cluster, in memory and recorded in Redis.

An agent's `Inventory` turns pool events into announcements; a manager's `memory.index.Index` applies them and answers
queries. `membership` keeps the nodes, `store` keeps the record. The package may
import `prfaas.kv` and lower packages.
"""
