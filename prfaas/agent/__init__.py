"""Agent: one process per machine. Owns the pool and all KV transfers, and serves the engines of the machine."""
