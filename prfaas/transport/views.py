"""Parts of scattered memory (pure)."""

from __future__ import annotations

from collections.abc import Sequence


def first_bytes(buffers: Sequence[bytes | memoryview], num_bytes: int) -> list[memoryview]:
    """Views of the first `num_bytes` of `buffers`, or of all where there are fewer."""
    taken = []
    for buffer in buffers:
        if num_bytes <= 0:
            break
        taken.append(memoryview(buffer)[:num_bytes])
        num_bytes -= len(buffer)
    return taken


def bytes_after(buffers: Sequence[bytes | memoryview], num_bytes: int) -> list[memoryview]:
    """Views of what is left of `buffers` after the first `num_bytes`."""
    left = []
    for buffer in buffers:
        if num_bytes < len(buffer):
            left.append(memoryview(buffer)[num_bytes:])
        num_bytes = max(0, num_bytes - len(buffer))
    return left
