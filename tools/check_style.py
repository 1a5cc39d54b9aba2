"""Style check of identifiers, docstrings and comments, run by `make lint`.

- `identifier`: a bound name is a pronoun instead of a noun.
- `opening`: a docstring starts with a question word or a preposition instead of a verb or a noun phrase.
- `sentence`: a sentence of a docstring or comment is longer than 30 words. Semicolons and colons also end a sentence.
- `comment`: a trailing comment continues the code on the left instead of starting a sentence.
- `mean`: the mean length of all sentences is above 18 words.
"""

from __future__ import annotations

import argparse
import ast
import io
import keyword
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ("prfaas", "tools", "tests", "benchmarks")
GENERATED = ("prfaas/rpc/generated",)
MAX_WORDS = 30
MAX_MEAN_WORDS = 18.0
MIN_WORDS = 3  # Shorter fragments, such as a unit, would lower the mean.

BANNED = {"its", "whose", "those", "theirs", "whoever", "ours", "one", "that", "other", "said"}
_OPENING = re.compile(r"(What|Which|Whether|How|That which|Whoever|Those|Of|If|When|Where|Why)(?![\w-])")
_DIRECTIVE = re.compile(r"#\s*(!|type:|noqa|pragma|fmt:|ruff:|mypy:|pylint:|isort:|shellcheck|-\*-)")
_SECTION = re.compile(r"(Args|Raises|Attributes|Returns|Yields|Notes?|Examples?):$")
_ITEM_SECTIONS = ("Args", "Raises", "Attributes")
_LIST_ITEM = re.compile(r"([-*•]|\d+[.)]|\([a-z\d]\))\s")
_DIAGRAM = re.compile(r"[─-▟→←↓↑⇒↔]|[-=]{2,}>|<[-=]{2,}| -> |^\||\|$|[-=+]{4,}|^>>> |^\.\.\. ")
_CODE_SPAN = re.compile(r"`+[^`]+`+")
_ABBREVIATIONS = ("e.g.", "i.e.", "cf.", "vs.")
_SENTENCE_END = re.compile(r"[.;:!?][)\"'\]]*$")
_UNIT = re.compile(r"monotonic|(milli|micro|nano)?seconds?|minutes|hours|bytes|bits|tokens|blocks|slots|pages|percent")


class Finding(NamedTuple):
    """Violation of a rule at a line."""

    path: str
    line: int
    rule: str
    text: str


Lines = Sequence[tuple[int, str]]  # Line numbers and texts.
Sentence = tuple[int, list[str]]  # The line where it starts, and its words.


def banned_identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each banned identifier that the code binds."""
    for node in ast.walk(tree):
        for name in _bound_names(node):
            if name.strip("_") in BANNED:
                yield getattr(node, "lineno", 0), name


def _bound_names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.ClassDef(name=name):
            yield name
        case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
            yield name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
            # Python's own convention names the operand of `__eq__` and the like `other`.
            is_special = name.startswith("__") and name.endswith("__")
            yield from (arg for arg in _arguments(node.args) if not (is_special and arg == "other"))
        case ast.Lambda():
            yield from _arguments(node.args)


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    positional = arguments.posonlyargs + arguments.args
    for argument in (*positional, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            yield argument.arg


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.Constant, bool]]:
    """Yield each string that documents something, and whether it is a docstring rather than a note under an attribute."""
    for node in ast.walk(tree):
        is_owner = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for position, statement in enumerate(body if isinstance(body := getattr(node, "body", None), list) else ()):
            match statement:
                case ast.Expr(value=ast.Constant(value=str()) as text):
                    yield text, is_owner and position == 0


def docstring_lines(constant: ast.Constant) -> Lines:
    """Return the numbered lines of a docstring without their common indentation."""
    first, *others = str(constant.value).split("\n")
    indent = min([constant.col_offset, *(len(line) - len(line.lstrip()) for line in others if line.strip())])
    return [(constant.lineno + i, text) for i, text in enumerate([first.strip(), *(line[indent:] for line in others)])]


def comment_texts(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[Lines]:
    """Yield the comments, adjacent lines together. A trailing comment only joins lines that start in its column."""
    text: list[tuple[int, str]] = []
    row = column = 0
    for token in tokens:
        if token.type != tokenize.COMMENT:
            continue
        is_trailing = bool(token.line[: token.start[1]].strip())
        if text and (is_trailing or token.start != (row + 1, column)):
            yield text
            text = []
        if not _DIRECTIVE.match(token.string):
            text.append((token.start[0], token.string.lstrip("#").removeprefix(" ").removeprefix(":")))
        row, column = token.start
    if text:
        yield text


def continuing_comments(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each trailing comment that does not start a sentence."""
    names: set[str] = set()
    row = 0
    for token in tokens:
        if token.start[0] != row:
            names, row = set(), token.start[0]
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            names.add(token.string)
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        text = token.string.lstrip("#: ")
        if token.line[: token.start[1]].strip() and not _starts_sentence(text, names):
            yield row, text


def _starts_sentence(text: str, names: set[str]) -> bool:
    first = text.split()[0].rstrip(",.;:") if text else ""
    is_lower_word = re.fullmatch(r"[a-z][a-z'’-]*", first) is not None
    return not is_lower_word or first in names or _UNIT.fullmatch(first) is not None


def sentences(lines: Lines) -> Iterator[Sentence]:
    """Yield the sentences of a text. Code examples, tables and diagrams are skipped and end a sentence."""
    words: list[str] = []
    start = 0
    for line, text in [*_prose(lines), (0, None)]:
        for word in _CODE_SPAN.sub("`code`", text or "").split():
            if "://" in word or not re.search(r"\w", word):
                continue
            start = start if words else line
            words.append(word)
            if _SENTENCE_END.search(word) and word.lstrip("(") not in _ABBREVIATIONS:
                yield start, words
                words = []
        if text is None and words:
            yield start, words
            words = []


def _prose(lines: Lines) -> Iterator[tuple[int, str | None]]:
    """Yield the lines that are prose, and None where a paragraph or list item ends."""
    section, section_indent, is_list, is_code, previous = "", 0, False, False, ""
    for line, raw in lines:
        text = raw.strip()
        indent = len(raw) - len(raw.lstrip())
        if not text or _DIAGRAM.search(text):
            is_code, is_list = is_code and not text, False
            yield line, None
        elif heading := _SECTION.match(text):
            section, section_indent, is_code = heading[1], 0, False
            yield line, None
        elif section and indent:
            section_indent = section_indent or indent
            is_item = section in _ITEM_SECTIONS and indent == section_indent
            if is_item or _LIST_ITEM.match(text):
                yield line, None
            if not section.startswith("Example"):
                yield line, text
        elif indent >= 2 and (is_code or (not is_list and previous.endswith(":")) or (indent >= 4 and not previous)):
            is_code = True
            yield line, None
        else:
            section, is_code = "", False
            if _LIST_ITEM.match(text):
                is_list = True
                yield line, None
            yield line, text
        previous = text


def check_file(path: Path, name: str) -> tuple[list[Finding], list[int]]:
    """Return the findings of a file, and the number of words of each of its sentences."""
    source = path.read_text()
    tree, tokens = ast.parse(source), list(tokenize.generate_tokens(io.StringIO(source).readline))
    found = [(line, "identifier", text) for line, text in banned_identifiers(tree)]
    texts = list(comment_texts(tokens))
    for constant, is_docstring in docstrings(tree):
        texts.append(docstring_lines(constant))
        if is_docstring and (opening := _OPENING.match(str(constant.value).lstrip())):
            found.append((constant.lineno, "opening", f"docstring starts with {opening[1]!r}"))
    counts = []
    for text in texts:
        for line, words in sentences(text):
            counts.append(len(words))
            if len(words) > MAX_WORDS:
                found.append((line, "sentence", f"{len(words)} words: {' '.join(words[:12])} ..."))
    for line, comment in continuing_comments(tokens):
        found.append((line, "comment", f"comment does not start a sentence: {comment}"))
    return [Finding(name, *finding) for finding in sorted(found)], [count for count in counts if count >= MIN_WORDS]


def python_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the Python files at and below `paths`, without the generated ones."""
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if not any(folder in file.resolve().as_posix() for folder in GENERATED):
                yield file


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings and return the exit status: 1 if there are any."""
    parser = argparse.ArgumentParser(description="Check identifiers, docstrings and comments.")
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; default: the whole project")
    parser.add_argument("--stats", action="store_true", help="print the findings by rule and the mean sentence length")
    options = parser.parse_args(arguments)
    findings: list[Finding] = []
    counts: list[int] = []
    for file in python_files(options.paths or [ROOT / folder for folder in CHECKED]):
        in_file, words = check_file(file, file.as_posix().removeprefix(f"{ROOT}/"))
        findings += in_file
        counts += words
    mean = sum(counts) / len(counts) if counts else 0.0
    if mean > MAX_MEAN_WORDS:
        findings.append(Finding("(all files)", 0, "mean", f"{mean:.1f} words in a sentence"))
    for finding in findings:
        print(f"{finding.path}:{finding.line}: {finding.rule}: {finding.text}")
    if options.stats:
        by_rule = Counter(finding.rule for finding in findings)
        print(", ".join(f"{rule} {number}" for rule, number in sorted(by_rule.items())) or "no findings")
        print(f"{len(counts)} sentences, {mean:.1f} words on average")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
