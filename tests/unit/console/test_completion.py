from __future__ import annotations

import shutil
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
    """Return what bash offers after these words."""
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["completion", "bash"])
    given = ["prfaas", *words.split(), *([] if words.endswith("--") else [""])]
    words_given = " ".join(word or '""' for word in given)
    ask = f'COMP_WORDS=({words_given}); COMP_CWORD={len(given) - 1}; _prfaas; echo "${{COMPREPLY[@]}}"'
    script = capsys.readouterr().out + ask
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split()


ASKED_OF_ZSH = """
autoload -Uz compinit && compinit -u -D
eval "$1"
compadd() { print -rl -- "$@" }
_default() { return 1 }
words=("${@[2,-1]}") CURRENT=$(($# - 1))
_bash_complete -o default -F _prfaas
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh (apt install zsh)")
@pytest.mark.parametrize(("words", "expected"), [((), "status"), (("pool",), "ls"), (("flip", "west-0"), "decode")])
def test_zsh_completes_them_too(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: str) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["completion", "zsh"])
    script = capsys.readouterr().out
    command = ["zsh", "-f", "-c", ASKED_OF_ZSH, "zsh", script, "prfaas", *words, ""]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert expected in done.stdout.split() and not done.stderr, done
