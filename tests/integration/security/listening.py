"""Sockets at which the processes of a session listen."""

import contextlib
import os
import socket
from dataclasses import dataclass
from typing import Any

import psutil

from prfaas.units import is_loopback
from tools.processes import Child


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
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # The process has ended.
            if os.getsid(process.pid) == child.process.pid:
                found |= {_listening(item) for item in process.net_connections("inet") if _listens(item)}
    return found


def _listens(item: Any) -> bool:
    return bool(item.status == psutil.CONN_LISTEN or (item.type == socket.SOCK_DGRAM and not item.raddr))


def _listening(item: Any) -> Listening:
    kind = "tcp" if item.type == socket.SOCK_STREAM else "udp"
    return Listening(kind, item.laddr.ip.removeprefix("::ffff:"), item.laddr.port)


def is_taken(address: str) -> bool:
    """Return whether somebody listens there."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False
