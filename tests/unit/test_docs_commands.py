"""Every command in the documentation is one that its program takes; what installs and deploys names things that are there."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.reference_tables import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS: dict[str, str] = PROJECT["scripts"]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
SHELLS = ("", "bash", "sh", "console", "shell")
INDENTED = re.compile(r"(?:^(?: {4}){1,2}\S.*\n)+", re.MULTILINE)
UNKNOWN = "--no-flag-has-this-name"


def lines_of(page: Path) -> Iterator[str]:
    """The lines of a page's blocks without a language, those that go on joined, comments away."""
    text = page.read_text()
    blocks = [match[2] for match in BLOCK.finditer(text) if match[1] in SHELLS] + [
        match[0] for match in INDENTED.finditer(text)
    ]
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            yield re.sub(r"\s#\s.*", "", line).strip()


def commands_of(page: Path) -> Iterator[list[str]]:
    """What a page tells people to run, as words; commands that `&&` joins are several."""
    for line in lines_of(page):
        for part in line.split(" && "):
            with contextlib.suppress(ValueError):  # no shell line
                words = shlex.split(part)
                if words and (words[0] in SCRIPTS or Path(words[0]).name in WAYS):
                    yield words


def _takes(words: list[str]) -> None:
    """The program's parser takes all of it: nothing is wrong but a flag that is made up here."""
    module, function = SCRIPTS[words[0]].split(":")
    main: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.suppress(SystemExit, argparse.ArgumentError):
        main([*words[1:], UNKNOWN])
    assert f"unrecognized arguments: {UNKNOWN}" in error.getvalue(), error.getvalue()


def _installs(words: list[str]) -> None:
    """The extras exist."""
    for extras in re.findall(r"prfaas\[([\w,-]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def _makes(words: list[str]) -> None:
    """The target exists."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert next(word for word in words[1:] if "=" not in word and not word.startswith("<")) in targets


def _names_files(words: list[str]) -> None:
    """What lies in this repository is there."""
    assert [word for word in words if word.startswith("deploy/") and not (ROOT / word).exists()] == []


WAYS: dict[str, Callable[[list[str]], None]] = {
    **dict.fromkeys(SCRIPTS, _takes),
    "pip": _installs,
    "make": _makes,
    **dict.fromkeys(("kubectl", "podman", "cp"), _names_files),
}
COMMANDS = [
    pytest.param(words, id=f"{page.stem}: {' '.join(words)[:60]}")
    for page in PAGES
    for words in commands_of(page)
    if not any(word in ("...", "│") or "─" in word for word in words)
]


def test_commands_are_found() -> None:
    found = {param.values[0][0] for param in COMMANDS}  # type: ignore[index]
    services = {f"prfaas-{its}" for its in ("agent", "router", "manager")}
    assert found >= {"prfaas", "prfaas-solve", "prfaas-sim", "make", "kubectl"} | services


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_in_the_documentation_is_taken(words: list[str]) -> None:
    WAYS[Path(words[0]).name](words)


def test_a_command_that_is_misspelt_is_not() -> None:
    with pytest.raises(AssertionError, match="unrecognized arguments"):
        _takes(["prfaas-sim", "--sweeep", "load=50%"])
