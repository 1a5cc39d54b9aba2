from __future__ import annotations

import subprocess

import pytest

from prfaas.cli.console import main


@pytest.mark.parametrize(
    ("words", "expected"), [("", "status"), ("pool", "ls"), ("config", "check"), ("drain --", "--within")]
)
def test_bash_completes_commands_and_flags(capsys: pytest.CaptureFixture[str], words: str, expected: str) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["completion", "bash"])
    given = ["prfaas", *words.split(), *([] if words.endswith("--") else [""])]
    words_given = " ".join(word or '""' for word in given)
    ask = f'COMP_WORDS=({words_given}); COMP_CWORD={len(given) - 1}; _prfaas; echo "${{COMPREPLY[@]}}"'
    script = capsys.readouterr().out + ask
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert expected in done.stdout.split()
