"""System commands that must succeed."""

from __future__ import annotations

import subprocess


def run(*command: str) -> None:
    """Run a command and wait for it.

    Raises:
        RuntimeError: The command fails. The message contains its standard error.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
