"""In-memory index: runs of blocks, exact-length states, prefix matching."""
