"""Loopback addresses that nobody uses, for programs that must be told theirs before they start.

They lie below the ports that the kernel gives to whoever connects or asks for any. Of these each process has a slice of its
own, held by a socket on the slice's first port, and goes through it: between the answer and the program's start nobody else
gets the same address.
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
KERNELS_FIRST_PORT = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])

_lock = threading.Lock()
_slices: dict[int, Iterator[int]] = {}  # by process, as a fork has its own


def free_address() -> str:
    """A "127.0.0.1:port" that no other call gives out before a whole slice has been.

    Where the kernel leaves no slice below its own ports it is one that was free a moment ago.

    Raises:
        OSError: every slice is taken, or every port of this process's is.
    """
    if KERNELS_FIRST_PORT < FIRST_PORT + SLICE_PORTS:
        return f"{HOST}:{_kernels_port()}"
    with _lock:
        ports = _slices.get(os.getpid()) or _slices.setdefault(os.getpid(), itertools.cycle(_take_slice()))
        for port in itertools.islice(ports, SLICE_PORTS):
            if _is_free(port):
                return f"{HOST}:{port}"
    raise OSError(errno.EADDRINUSE, "every port of this process's slice is in use")


def _take_slice() -> range:
    """The ports of the first slice that no living process has."""
    for first in range(FIRST_PORT, KERNELS_FIRST_PORT - SLICE_PORTS + 1, SLICE_PORTS):
        holder = socket.socket()
        try:
            holder.bind((HOST, first))
        except OSError:
            holder.close()
            continue
        holder.detach()  # bound for as long as this process lives
        return range(first + 1, first + SLICE_PORTS)
    raise OSError(errno.EADDRINUSE, f"every slice of ports from {FIRST_PORT} on is taken")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _kernels_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
