"""Loopback addresses that nobody uses, for programs that must be told theirs before they start."""

from __future__ import annotations

import socket


def free_address() -> str:
    """A "127.0.0.1:port" that was free a moment ago; bind port 0 wherever the program can say what it got."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
