"""Every command in the documentation is one that its program takes; what installs and deploys names things that are there.

No command goes unlooked at: what a shell block runs has a way to be checked here, by the name of its program (`WAYS`), and is
run besides where `tests/integration/docs` lists it. vLLM's own parser takes its commands in `tests/integration/connector`.
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import itertools
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import markdown
import pytest

from tests.support.docs_blocks import LANGUAGES, PAGES, Block, blocks_of, commands_of, mentioned, shell_blocks
from tools.reference_tables import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS: dict[str, str] = PROJECT["scripts"]
UNKNOWN = "--no-flag-has-this-name"
SERVERS = ("prfaas/router", "prfaas/manager", "prfaas/agent", "prfaas/colocate")
# Run in tests/integration/docs, by themselves or by a function that checks the files that they name.
RUN_ELSEWHERE = {"base64", "chmod", "cp", "head", "install", "scp", "podman", "iperf3", "systemctl", "useradd"}
HIGHLIGHTED = {"pymdownx.highlight": {"use_pygments": False}}


def _said_of(words: Sequence[str]) -> str:
    """Return the error of a command with these arguments and an unknown flag."""
    module, function = SCRIPTS[words[0]].split(":")
    main: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    error = io.StringIO()
    with (
        contextlib.redirect_stderr(error),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(SystemExit, argparse.ArgumentError),
    ):
        main([*words[1:], UNKNOWN])
    return error.getvalue()


def _takes(words: Sequence[str]) -> None:
    """The program's parser takes all of it: nothing is wrong but that flag."""
    output = _said_of(words)
    assert f"unrecognized arguments: {UNKNOWN}" in output, output


def _installs(words: Sequence[str]) -> None:
    """The extras exist."""
    assert "install" in words
    for extras in re.findall(r"prfaas\[([\w,-]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def _makes(words: Sequence[str]) -> None:
    """`make -n` finds the targets and what they are made of."""
    item = [word for word in words[1:] if not word.startswith("AREA=<")]
    subprocess.run(["make", "-n", *item], cwd=ROOT, capture_output=True, check=True, timeout=150)


def _asks(words: Sequence[str]) -> None:
    """One of our servers answers at that path, and what it is sent is JSON."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("url")
    parser.add_argument("-H", action="append")
    parser.add_argument("-d")
    parser.add_argument("--cacert")
    item = parser.parse_args(list(words[1:]))
    path = urlsplit(item.url if "//" in item.url else f"http://{item.url}").path
    sources = (file.read_text() for folder in SERVERS for file in (ROOT / folder).rglob("*.py"))
    assert any(f'"{path}"' in source for source in sources), path
    assert item.d is None or json.loads(item.d)


def _runs_python(words: Sequence[str]) -> None:
    """The module exists, and its source knows the flags."""
    assert words[1] == "-m"
    if words[2] == "venv":
        assert len(words) == 4
        return
    spec = importlib.util.find_spec(f"{words[2]}.__main__")
    assert spec is not None and spec.origin is not None
    known = "".join(file.read_text() for file in Path(spec.origin).parent.glob("*.py"))
    assert [word for word in words[3:] if word.startswith("--") and f'"{word}"' not in known] == []
    assert [word for word in words[3:4] if not word.startswith("-") and f'"{word}"' not in known] == []


def _names_secrets(words: Sequence[str]) -> None:
    """The chart asks for a Secret or a label of this name, or the namespace has it. A file exists."""
    chart = "".join(file.read_text() for file in (ROOT / "deploy/helm").rglob("*.yaml"))
    if "secret" in words:
        name = words[words.index("generic") + 1].removeprefix("west-")
        assert f'"{name.removesuffix("-tls")}"' in chart or f": {name}" in chart
        for word in words:
            key = word.removeprefix("--from-file=").partition("=")[0]
            assert not word.startswith("--from-file=") or f"/{key}" in chart
    elif words[1] in ("apply", "patch"):
        assert (ROOT / words[-1]).exists()
    elif "label" in words and "node" in words:
        key, value = words[-1].split("=")
        assert f"nodeSelector: {{{key}: " in chart and f"name: {value}" in chart
    else:
        assert "namespace" in words


def _installs_chart(words: Sequence[str]) -> None:
    """The chart and its files of values exist."""
    assert words[1] in ("install", "upgrade") and (ROOT / words[3] / "Chart.yaml").exists()
    for flag, value in itertools.pairwise(words):
        assert flag != "--values" or value.startswith("my-") or (ROOT / value).exists()


def _serves_a_model(words: Sequence[str]) -> None:
    """`vllm serve`; its own parser takes the rest where vLLM is imported anyway."""
    assert words[1] == "serve"
    for before, word in itertools.pairwise(words):
        assert not before.endswith("-config") or json.loads(word)


WAYS: dict[str, Callable[[Sequence[str]], None]] = {
    **dict.fromkeys(SCRIPTS, _takes),
    "pip": _installs,
    "make": _makes,
    "curl": _asks,
    "python": _runs_python,
    "python3": _runs_python,
    "helm": _installs_chart,
    "kubectl": _names_secrets,
    "vllm": _serves_a_model,
}
# What stands within sentences may name a command without all that it needs.
MENTIONS = re.compile(
    r"^(?:prfaas(?:-[a-z]+)?|make|pip|curl|python3?|\.venv/bin/\w+|apt|ssh|sysctl|chmod|systemd-analyze) \S"
)
MENTIONED_ELSEWHERE = ("apt", "ssh", "sysctl", "chmod", "systemd-analyze")  # Programs of the operator's machine.


def _mentions(words: Sequence[str]) -> None:
    """As `_takes`, but for what is left out or stands for something, as NODE and ROLE do."""
    output = _said_of(words)
    lacks = (
        "arguments are required",
        "expected one argument",
        *(f"invalid choice: '{word}'" for word in words if word.isupper()),
    )
    assert any(text in output for text in (f"unrecognized arguments: {UNKNOWN}", *lacks)), output


def _mentioned() -> Iterator[list[str]]:
    """Each command once."""
    seen = {tuple(words): words for page in PAGES for words in _mentioned_in(page)}
    yield from seen.values()


def _mentioned_in(page: Path) -> Iterator[list[str]]:
    for text in mentioned(page):
        if MENTIONS.match(re.sub(r"^(?:[A-Z_]+=\S+ |sudo )", "", text)):
            yield from commands_of(text.replace("…", "").replace("<", "").replace(">", ""))


def _id(block: Block) -> str:
    return block.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_code_says_its_language(page: Path) -> None:
    extensions = ["pymdownx.superfences", "pymdownx.highlight", "tables"]
    html = markdown.markdown(page.read_text(), extensions=extensions, extension_configs=HIGHLIGHTED)
    languages = re.findall(r"<pre[^>]*><code(?: class=\"language-(\w+)\")?>", html)
    assert set(languages) <= set(LANGUAGES), "an indented block has none"
    assert len(languages) == len(list(blocks_of(page)))


@pytest.mark.parametrize("block", shell_blocks(), ids=_id)
def test_a_command_in_the_documentation_is_taken(block: Block) -> None:
    for words in commands_of(block.text):
        if (name := Path(words[0]).name) not in RUN_ELSEWHERE:
            WAYS[name](words)


def test_every_program_in_the_documentation_has_its_way_and_none_is_left_over() -> None:
    found = {Path(words[0]).name for block in shell_blocks() for words in commands_of(block.text)}
    assert found >= {
        "prfaas",
        "prfaas-agent",
        "prfaas-router",
        "prfaas-manager",
        "prfaas-sim",
        "make",
        "kubectl",
        "curl",
    }
    assert set(WAYS) - found <= set(SCRIPTS) | {"python3"} and found >= RUN_ELSEWHERE


def test_a_command_within_a_sentence_is_one_that_its_program_knows() -> None:
    commands = list(_mentioned())
    assert ["prfaas", "drain", "NODE"] in commands and ["make", "demo", "MODEL=gemma3"] in commands
    for words in commands:
        name = Path(words[0]).name
        if name in SCRIPTS:
            _mentions([word for word in words if word != "--help"])
        elif name not in MENTIONED_ELSEWHERE and not words[0].startswith(".venv"):
            WAYS[name](words)


@pytest.mark.parametrize(
    "command",
    [
        "prfaas-sim --sweeep load=50%",
        "pip install 'prfaas[routr]'",
        "curl http://10.0.1.1:8080/v1/completion",
        "python -m tools.wan nowhere",
        "helm install west deploy/helms",
        "kubectl -n prfaas create secret generic prfaas-secrets --from-file=secret=/etc/prfaas/secret",
        "vllm serve M --kv-transfer-config '{'",
    ],
)
def test_a_command_that_is_misspelt_is_not_taken(command: str) -> None:
    (words,) = commands_of(command)
    with pytest.raises((AssertionError, ValueError, subprocess.CalledProcessError, ModuleNotFoundError)):
        WAYS[words[0]](words)


def test_a_script_is_read_as_a_shell_reads_it() -> None:
    script = "# west\na 'b\nc' \\\n  d > out && e < in | sudo f   # why\nX=1 g \"h i\"\n"
    assert list(commands_of(script)) == [["a", "b\nc", "d"], ["e"], ["f"], ["g", "h i"]]
