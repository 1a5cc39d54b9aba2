"""Code blocks of README and docs/, and their shell commands as words."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.reference_tables import ROOT

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md")))
LANGUAGES = ("sh", "text", "yaml", "json", "python", "promql", "mermaid")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"(^|\s)#\s.*$", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_SEPARATORS = frozenset("\n;&|")


@dataclass(frozen=True)
class Block:
    """One fenced block. `text` has no indentation."""

    page: Path
    language: str
    text: str

    @property
    def name(self) -> str:
        """Return the page and the first line with a command."""
        lines = (line for line in self.text.splitlines() if line.strip() and not line.startswith("#"))
        return f"{self.page.stem}: {next(lines, '')[:70]}"


def blocks_of(page: Path) -> Iterator[Block]:
    for match in _FENCE.finditer(page.read_text()):
        lines = (line.removeprefix(match["indent"]) for line in match["text"].splitlines(keepends=True))
        yield Block(page, match["language"], "".join(lines))


def shell_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page) if block.language == "sh"]


def commands_of(text: str) -> Iterator[list[str]]:
    """Yield each simple command of a script as words, without variables before it and without redirections.

    A quotation must not contain " # ".

    Raises:
        ValueError: a quotation does not end.
    """
    words: list[str] = []
    for token in _tokens(text):
        if set(token) <= _SEPARATORS:
            yield from _command(words)
            words = []
        else:
            words.append(token)
    yield from _command(words)


def _tokens(text: str) -> Iterator[str]:
    lexer = shlex.shlex(_COMMENT.sub("", text.replace("\\\n", " ")), posix=True, punctuation_chars="\n;&|<>")
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    lexer.commenters = ""
    return iter(lexer)


def _command(words: list[str]) -> Iterator[list[str]]:
    kept: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        is_target = before in ("<", ">", ">>")
        is_variable = not kept and re.fullmatch(r"[A-Z_]+=.*", word)
        if not (is_target or is_variable or word in ("<", ">", ">>")):
            kept.append(word)
    if kept[:1] == ["sudo"]:
        kept = kept[1:]
    if kept:
        yield kept


def mentioned(page: Path) -> Iterator[str]:
    """Yield the inline code of a page, outside fenced blocks."""
    yield from _INLINE.findall(_FENCE.sub("", page.read_text()))
