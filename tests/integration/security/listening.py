"""Sockets at which the processes of a session listen, from the kernel's tables."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prfaas.units import is_loopback
from tools.processes import Child

_LISTEN, _UDP_UNCONNECTED = "0A", "07"


@dataclass(frozen=True)
class Listening:
    """One listening socket."""

    kind: str
    host: str
    port: int

    @property
    def is_beyond_loopback(self) -> bool:
        return not is_loopback(self.host)


def listening_of(child: Child) -> set[Listening]:
    """Return the TCP and UDP sockets at which a child or a process of its session listens."""
    inodes = {inode for pid in _session(child.process.pid) for inode in _inodes(pid)}
    found = set()
    for kind, state in (("tcp", _LISTEN), ("tcp6", _LISTEN), ("udp", _UDP_UNCONNECTED), ("udp6", _UDP_UNCONNECTED)):
        for line in Path(f"/proc/{child.process.pid}/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and fields[9] in inodes:
                found.add(Listening(kind, *_address(fields[1])))
    return found


def _session(leader: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError):  # The process has ended.
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader:
                yield int(entry.name)


def _inodes(pid: int) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):  # The process has ended.
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    yield target[8:-1]


def _address(text: str) -> tuple[str, int]:
    """As /proc/net writes it: the address in words of 32 bits of this machine's byte order, the port in hexadecimal."""
    host, port = text.split(":")
    packed = b"".join(struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), int(port, 16)


def is_taken(address: str) -> bool:
    """Return whether somebody listens there."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False
