"""Findings of the style check, and code that it must leave alone."""

import textwrap
from pathlib import Path

import pytest

from tools.check_style import ROOT, check_file, main, python_files

WORDS = "word " * 31


def _findings(folder: Path, source: str) -> list[tuple[int, str]]:
    path = folder / "module.py"
    path.write_text(textwrap.dedent(source))
    return [(finding.line, finding.rule) for finding in check_file(path, "module.py")[0]]


BANNED_NAMES = (
    *("its = 1", "_its = 1", "for one, x in y: pass", "def f(those): pass", "def f(*, said=1): pass"),
    *("f = lambda that: that", "class A:\n    theirs: int", "self.ours = 1", "x = [other for other in y]"),
    *("import a as whose", "try: pass\nexcept OSError as that: pass", "def one(): pass"),
    "def combine(self, other): pass",
)
BANNED_OPENINGS = (
    *('"""What it does."""', 'class A:\n    """Those of us."""', 'def f():\n    """Whether x."""'),
    'async def f():\n    """If x."""',
)
ALLOWED = (
    *("def __eq__(self, other): pass", "x = y.one", "f(one=1)", "others = [num_other]"),
    *('"""What-if panel."""', 'x = 1\n"""What it is."""', '"""Offer of a peer."""', "# see below\nx = 1\n"),
)


@pytest.mark.parametrize(
    ("code", "rules"),
    [
        *((code, ["identifier"]) for code in BANNED_NAMES),
        *((code, ["opening"]) for code in BANNED_OPENINGS),
        *((code, []) for code in ALLOWED),
    ],
)
def test_banned_names_and_docstring_openings_are_found_wherever_they_stand(
    tmp_path: Path, code: str, rules: list[str]
) -> None:
    assert sorted({rule for _, rule in _findings(tmp_path, code)}) == rules


def test_sentence_over_thirty_words_is_found_at_the_line_where_it_starts(tmp_path: Path) -> None:
    docstring = f'"""Short.\n\n{"word " * 14}word.\n{"word " * 16}\n{"word " * 15}.\n"""\n'
    comments = f"x = 1\n# Short. A {'word ' * 15}\n# {'word ' * 15}.\n"
    assert _findings(tmp_path, docstring + comments) == [(4, "sentence"), (8, "sentence")]


def test_sentences_end_at_punctuation_blank_lines_and_list_items(tmp_path: Path) -> None:
    long = "word " * 19 + "word"
    items = "".join(f"{mark} {long}\n" for mark in ("", "-", "*", "1.", "(a)"))
    sections = f"\n\nArgs:\n    x: {long}\n    y: {long}\n"
    assert _findings(tmp_path, f'"""{long}; {long}: {long}? {long}\n\n{items}{sections}"""') == []


@pytest.mark.parametrize(
    "text",
    [
        f"Run::\n\n    {WORDS}\n",
        f"Example:\n    {WORDS}\n",
        f"Return.\n\n    {WORDS}\n\n    {WORDS}\n",
        f"| {WORDS} |\n",
        f"a ──> {WORDS}\n",
        f"`{WORDS}`\n",
        "https://a.b/c " * 31,
    ],
)
def test_code_tables_diagrams_and_addresses_are_no_sentences(tmp_path: Path, text: str) -> None:
    assert _findings(tmp_path, f'"""{text}"""') == []


def test_items_of_a_section_are_prose(tmp_path: Path) -> None:
    assert _findings(tmp_path, f'def f():\n    """Return.\n\n    Raises:\n        E: {WORDS}\n    """') == [
        (5, "sentence")
    ]


@pytest.mark.parametrize("comment", ["of those", "which may be late", "the last", "seen by nobody", "how often"])
def test_trailing_comment_that_continues_the_code_is_found(tmp_path: Path, comment: str) -> None:
    assert _findings(tmp_path, f"x = 1  # {comment}") == [(1, "comment")]


@pytest.mark.parametrize(
    "comment",
    [
        "The last.",
        "seconds",
        "bytes, without heads",
        "monotonic seconds",
        "2 of 3",
        "`x` counts",
        "num_blocks of y",
        "x grows",
        "noqa: E501",
        "type: ignore[x]  # reason",
        "pragma: no cover",
        "vLLM counts",
        "→ end",
        '"a" or "b"',
    ],
)
def test_trailing_comment_may_start_a_sentence_or_with_code_or_a_unit(tmp_path: Path, comment: str) -> None:
    assert _findings(tmp_path, f"x = 1  # {comment}") == []


def test_trailing_comments_of_adjacent_lines_are_separate_texts(tmp_path: Path) -> None:
    half = "Word " * 20
    assert _findings(tmp_path, f"x = 1  # {half}\ny = 2  # {half}\n# {half}\n") == []


def test_run_prints_findings_with_their_place_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.py").write_text("x = 1\nits = 2\n")
    (tmp_path / "good.py").write_text("x = 1  # Reason.\n")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path}/bad.py:2: identifier: its\n"
    assert main([str(tmp_path / "good.py")]) == 0
    assert capsys.readouterr().out == ""


def test_statistics_count_findings_by_rule_and_the_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "module.py").write_text('"""Which of three. These are five more words. Tiny."""\nits = one = 2\n')
    assert main(["--stats", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["identifier 2, opening 1", "2 sentences, 4.0 words on average"]


def test_mean_over_eighteen_words_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "module.py").write_text(f'"""{"Word " * 19}."""\n')
    assert main([str(tmp_path)]) == 1
    assert "mean: 19.0 words" in capsys.readouterr().out


def test_generated_code_is_not_checked() -> None:
    assert list(python_files([ROOT / "prfaas/rpc"]))
    assert not list(python_files([ROOT / "prfaas/rpc/generated"]))
