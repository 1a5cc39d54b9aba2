"""What a node holds: arenas of KV blocks in shared memory, and who may use them."""
