"""One command of the system that must succeed."""

from __future__ import annotations

import subprocess


def run(*command: str) -> None:
    """Run it to its end.

    Raises:
        RuntimeError: it fails; with what it says.
    """
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ended.stderr.strip()}")
