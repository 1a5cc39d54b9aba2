"""`prfaas top` fits a small terminal and ends when `q` is typed."""

import io
import os
import pty
import re
from typing import Any

import pytest

from prfaas.console.tables import top_tables
from prfaas.console.terminal import CommandOutput
from prfaas.console.watching import watch
from tests.unit.console.test_tables import LINK, STATE

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def _node(number: int) -> dict[str, Any]:
    known: dict[str, Any] = STATE["nodes"][0]  # type: ignore[index]
    engines = [{"instance": f"east-{number}/0", "role": "prefill", "model": "tiny"}]
    named = known["node"] | {"name": f"east-{number}", "engines": engines}
    return known | {"node": named, "links": [LINK], "is_silent": number == 29, "silent_seconds": 7.0}


def test_top_fits_80_columns_and_24_lines_and_q_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state = STATE | {"nodes": [_node(number) for number in range(30)]}
    terminal, typed = pty.openpty()
    with os.fdopen(terminal, "wb", buffering=0) as keyboard, os.fdopen(typed) as stdin, Screen() as screen:
        for name, value in (("COLUMNS", "80"), ("LINES", "24"), ("TERM", "xterm")):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("sys.stdout", screen)

        def answer() -> CommandOutput:
            keyboard.write(b"q")
            return CommandOutput({}, top_tables(state, {"plan": None}))

        watch(answer, interval_seconds=3600)
        lines = ESCAPES.sub("", screen.getvalue()).splitlines()
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    assert "east-29" in "".join(lines)  # A silent node comes first.
