"""Live view: repeated output of a deployment's state."""

import io
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
from prfaas.errors import ConfigError

_CLEAR = "\x1b[H\x1b[2J"
_ALTERNATE, _NORMAL = "\x1b[?1049h", "\x1b[?1049l"


def watch(answer: Callable[[], CommandOutput], *, interval_seconds: float) -> None:
    """Show `answer()` every `interval_seconds` until interrupted, or until `q` is typed.

    Raises:
        ConfigError: standard output is no terminal.
    """
    if not sys.stdout.isatty():
        raise ConfigError("top needs a terminal; prfaas status --json is for programs")
    with _alternate_screen():
        while True:
            sys.stdout.write(_CLEAR + _fitted(answer()))
            sys.stdout.flush()
            if _is_quit_within(interval_seconds):
                return


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
