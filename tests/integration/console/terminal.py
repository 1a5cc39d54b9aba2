"""Runs `prfaas` as people do: on a pseudo-terminal or into a pipe, in a process of its own or in this one."""

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from prfaas.cli.console import main

COMMAND = (sys.executable, "-m", "prfaas.cli.console")
SECONDS = 120.0
TERMINAL = {"TERM": "xterm-256color", "COLUMNS": "200"}


@dataclass(frozen=True)
class Ran:
    """Exit status and output of a command."""

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


def run_here_on_terminal(*arguments: str) -> Ran:
    """`run_on_terminal` in this process, as `run_here`."""
    with (
        _environment(TERMINAL),
        _terminal() as (screen, parts),
        contextlib.redirect_stdout(screen),
        contextlib.redirect_stderr(screen),
    ):
        status = main(arguments)
    return Ran(status, b"".join(parts).decode())


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _terminal() -> Iterator[tuple[TextIO, list[bytes]]]:
    """A pseudo-terminal to write to; what was written is all there once the context has ended."""
    main, secondary = pty.openpty()
    parts: list[bytes] = []
    reading = threading.Thread(target=lambda: parts.append(_read_all(main)))
    reading.start()
    try:
        with os.fdopen(secondary, "w") as screen:
            yield screen, parts
    finally:
        reading.join(SECONDS)


def _read_all(terminal: int) -> bytes:
    parts = []
    try:
        while part := os.read(terminal, 65536):
            parts.append(part)
    except OSError:  # Linux ends a pseudo-terminal so
        pass
    finally:
        os.close(terminal)
    return b"".join(parts)
