"""docs/vllm-reference.md names every key, every outcome and every log line, and none that does not exist."""

import re
import typing
from pathlib import Path

from prfaas.config import settings
from prfaas.connector.metadata import Outcome
from prfaas.connector.settings import ConnectorSettings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/vllm-reference.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"## {title}")[1].split("\n## ")[0]


def first_cells(text: str) -> set[str]:
    rows = re.findall(r"^\| (`[^|]+) \|", text, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def words_of(kind: object) -> set[str]:
    """The words of a Literal, or of a union of several."""
    return {word for arg in typing.get_args(kind) for word in (words_of(arg) if typing.get_args(arg) else {arg})}


def test_the_keys_are_those_of_the_code() -> None:
    assert first_cells(section("Keys of")) == {name for name, _ in settings(ConnectorSettings)}


def test_the_outcomes_are_those_of_the_code() -> None:
    documented = first_cells(section("Log lines").split("| outcome |")[1])
    assert documented | {"completed"} == words_of(Outcome)


def test_the_log_lines_are_those_of_the_code() -> None:
    files = [*(ROOT / "prfaas/connector").rglob("*.py"), ROOT / "prfaas/agent/engine/client.py"]
    logged = {event for file in files for event in re.findall(r'_log\.\w+\(\s*"([a-z_.]+)"', file.read_text())}
    assert first_cells(section("Log lines").split("| outcome |")[0]) == logged
