"""Memory of this host to send from or to receive into."""

from __future__ import annotations

import contextlib
import math
import mmap
from pathlib import Path

from prfaas.errors import ConfigError

MEMINFO = Path("/proc/meminfo")


def take(num_bytes: int, *, flag: str) -> memoryview:
    """So many bytes, which `flag` asked for.

    Raises:
        ConfigError: this host has not so many; the kernel would hand them out, and kill somebody once they are written to.
    """
    free = _available_bytes()
    if num_bytes > free:
        raise ConfigError(f"{flag}: {num_bytes / 1e9:.1f} GB of memory, and this host has {free / 1e9:.1f} GB to spare")
    return memoryview(mmap.mmap(-1, num_bytes))


def _available_bytes() -> float:
    """What can be had without pushing others out; infinite where the kernel does not say."""
    with contextlib.suppress(OSError):
        for line in MEMINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) << 10
    return math.inf
