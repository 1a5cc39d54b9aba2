"""Free loopback addresses for programs that must know their address before they start.

The ports lie below the kernel's ephemeral range. Each process reserves a slice of them with a socket on the first port.
It cycles through its slice, so no other process gets an address before the program starts.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

HOST = "127.0.0.1"
FIRST_PORT, SLICE_PORTS = 20_480, 256
EPHEMERAL_FIRST_PORT = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])

_lock = threading.Lock()
_slices: dict[int, Iterator[int]] = {}  # By process id, because a forked child needs a slice of its own.


def free_address() -> str:
    """Return a free "127.0.0.1:port". It is not returned again before the whole slice has been used.

    Fall back to an ephemeral port if there is no room for a slice below the ephemeral range.

    Raises:
        OSError: All slices are taken, or all ports of this process's slice are in use.
    """
    if EPHEMERAL_FIRST_PORT < FIRST_PORT + SLICE_PORTS:
        return f"{HOST}:{_ephemeral_port()}"
    with _lock:
        ports = _slices.get(os.getpid()) or _slices.setdefault(os.getpid(), itertools.cycle(_take_slice()))
        for port in itertools.islice(ports, SLICE_PORTS):
            if _is_free(port):
                return f"{HOST}:{port}"
    raise OSError(errno.EADDRINUSE, "every port of this process's slice is in use")


def _take_slice() -> range:
    """Reserve the first free slice and return its ports."""
    for first in range(FIRST_PORT, EPHEMERAL_FIRST_PORT - SLICE_PORTS + 1, SLICE_PORTS):
        holder = socket.socket()
        try:
            holder.bind((HOST, first))
        except OSError:
            holder.close()
            continue
        holder.detach()  # Keeps the port bound until this process ends.
        return range(first + 1, first + SLICE_PORTS)
    raise OSError(errno.EADDRINUSE, f"every slice of ports from {FIRST_PORT} on is taken")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _ephemeral_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
