"""Processes of the executor: shared memory, rings, start and restart."""
