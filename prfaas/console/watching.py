"""Live view: repeated output of a deployment's state."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prfaas.console.terminal import CommandOutput, show_table

_CLEAR = "\x1b[H\x1b[2J"
_ALTERNATE, _NORMAL = "\x1b[?1049h", "\x1b[?1049l"


def watch(answer: Callable[[], CommandOutput], *, interval_seconds: float, num_refreshes: int, as_json: bool) -> None:
    """Show `answer()` every `interval_seconds`, `num_refreshes` times, or until interrupted for 0.

    Without a terminal, write one JSON document per line.
    """
    lines = as_json or not sys.stdout.isatty()
    with _nothing() if lines else _alternate_screen():
        shown = 0
        while not num_refreshes or shown < num_refreshes:
            if shown:
                time.sleep(interval_seconds)
            _write(answer(), lines=lines)
            shown += 1


def _write(answer: CommandOutput, *, lines: bool) -> None:
    if lines:
        sys.stdout.write(json.dumps(answer.document) + "\n")
    else:
        sys.stdout.write(_CLEAR)
        for table in answer.tables:
            show_table(table)
    sys.stdout.flush()


@contextmanager
def _alternate_screen() -> Iterator[None]:
    """Use the terminal's alternate screen, so that earlier output reappears afterwards."""
    sys.stdout.write(_ALTERNATE)
    try:
        yield
    finally:
        sys.stdout.write(_NORMAL)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
