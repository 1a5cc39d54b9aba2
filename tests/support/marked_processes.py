"""Processes with a mark in their environment, which all descendants of one process inherit."""

from pathlib import Path


def marked_processes(mark: str) -> dict[int, str]:
    """Return the command lines of living processes with "NAME=VALUE" in their environment, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # The process has ended.
            continue
    return found
