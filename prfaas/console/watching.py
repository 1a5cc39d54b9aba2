"""Live view: repeated output of a deployment's state."""

from __future__ import annotations

import io
import json
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

from prfaas.console.terminal import CommandOutput, show_table

_CLEAR = "\x1b[H\x1b[2J"
_ALTERNATE, _NORMAL = "\x1b[?1049h", "\x1b[?1049l"


def watch(answer: Callable[[], CommandOutput], *, interval_seconds: float, num_refreshes: int, as_json: bool) -> None:
    """Show `answer()` every `interval_seconds`, `num_refreshes` times; for 0 until interrupted, or `q` is typed.

    Without a terminal, write one JSON document per line.
    """
    lines = as_json or not sys.stdout.isatty()
    with _nothing() if lines else _alternate_screen():
        shown = 0
        while not num_refreshes or shown < num_refreshes:
            if shown and _is_quit_within(interval_seconds):
                return
            _write(answer(), lines=lines)
            shown += 1


def _write(answer: CommandOutput, *, lines: bool) -> None:
    if lines:
        sys.stdout.write(json.dumps(answer.document) + "\n")
    else:
        sys.stdout.write(_CLEAR + _fitted(answer))
    sys.stdout.flush()


class _Screen(io.StringIO):
    """Text of a terminal's screen."""

    def isatty(self) -> bool:
        return True


def _fitted(answer: CommandOutput) -> str:
    """Return as many lines of an answer as the terminal shows. The last line tells how to quit."""
    screen = _Screen()
    with redirect_stdout(screen):
        for table in answer.tables:
            show_table(table)
    lines, num_shown = screen.getvalue().splitlines(), shutil.get_terminal_size().lines - 1
    num_left = max(0, len(lines) - num_shown)
    return "\n".join([*lines[:num_shown], f"{num_left} more lines; q quits" if num_left else "q quits"])


def _is_quit_within(seconds: float) -> bool:
    """Wait for the next refresh. Return whether the user typed `q`; another key refreshes at once."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q")


@contextmanager
def _alternate_screen() -> Iterator[None]:
    """Use the terminal's alternate screen, so that earlier output reappears afterwards."""
    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    if before is not None:
        tty.setcbreak(sys.stdin)
    sys.stdout.write(_ALTERNATE)
    try:
        yield
    finally:
        sys.stdout.write(_NORMAL)
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
