from __future__ import annotations

import subprocess

import pytest

from prfaas.cli.console import main


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "status"),
        ("pool", "ls"),
        ("config", "check"),
        ("drain --", "--within"),
        ("drain west-0 --", "--within"),
        ("flip west-0", "decode"),
        ("completion", "zsh"),
        ("doctor --", "--sidecar"),
    ],
)
def test_bash_completes_commands_and_flags(capsys: pytest.CaptureFixture[str], words: str, expected: str) -> None:
    assert expected in completed(capsys, words)


def test_a_word_that_is_no_choice_is_offered_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "decode" not in completed(capsys, "flip"), "that is a node's name"


def completed(capsys: pytest.CaptureFixture[str], words: str) -> list[str]:
    """What bash offers after these words."""
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["completion", "bash"])
    given = ["prfaas", *words.split(), *([] if words.endswith("--") else [""])]
    words_given = " ".join(word or '""' for word in given)
    ask = f'COMP_WORDS=({words_given}); COMP_CWORD={len(given) - 1}; _prfaas; echo "${{COMPREPLY[@]}}"'
    script = capsys.readouterr().out + ask
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split()
