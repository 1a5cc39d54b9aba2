"""Runs `prfaas` as people do: in a process of its own, on a pseudo-terminal or into a pipe."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from prfaas.cli.console import main

COMMAND = (sys.executable, "-m", "prfaas.cli.console")
SECONDS = 120.0


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it wrote."""

    status: int
    output: str
    error: str = ""

    @property
    def document(self) -> Any:
        return json.loads(self.output)


def run(*arguments: str) -> Ran:
    """Into pipes, as a program runs it."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


def run_here(*arguments: str) -> Ran:
    """In this process, which spares a second of starting one; nothing else may write to standard output meanwhile."""
    output, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        status = main(arguments)
    return Ran(status, output.getvalue(), error.getvalue())


def run_on_terminal(*arguments: str) -> Ran:
    """On a terminal of 200 columns; what it wrote to either stream is its output."""
    main, secondary = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    with subprocess.Popen([*COMMAND, *arguments], stdout=secondary, stderr=secondary, env=environment) as process:
        os.close(secondary)
        output = _read_all(main)
        return Ran(process.wait(SECONDS), output)


def _read_all(terminal: int) -> str:
    parts = []
    try:
        while part := os.read(terminal, 65536):
            parts.append(part)
    except OSError:  # Linux ends a pseudo-terminal so
        pass
    finally:
        os.close(terminal)
    return b"".join(parts).decode()
