"""Nothing that arrives becomes code: no pickle, no eval, no shell; and the core stands on few shoulders."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Iterator

import pytest

from tools.reference_tables import ROOT

SOURCES = sorted((ROOT / "prfaas").rglob("*.py"))
MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "asyncio.create_subprocess_shell",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "runpy.run_path",
    "runpy.run_module",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "yaml.load_all",
    "yaml.unsafe_load_all",
    "yaml.full_load_all",
}
# Loaders that unpickle, or do not, by one argument: its name, and the value that is safe, and whether it is the default.
LOADERS = {
    "torch.load": ("weights_only", "True", False),
    "numpy.load": ("allow_pickle", "False", True),
    "np.load": ("allow_pickle", "False", True),
}
HEAVY = {"torch", "vllm", "transformers", "grpcio", "redis", "aiohttp", "numpy"}


def findings(source: str) -> Iterator[str]:
    """Return the calls that could execute data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in MODULES:
                yield node.module or ""
            yield from (name for item in node.names if (name := f"{node.module}.{item.name}") in CALLS | LOADERS.keys())
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in CALLS or given.get("shell") == "True":
        yield name
    if name in LOADERS:
        argument, safe, is_default = LOADERS[name]
        if given.get(argument, safe if is_default else "") != safe:
            yield name


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from dill import loads",
        "eval(text)",
        "subprocess.run(x, shell=True)",
        "yaml.load(f)",
        "os.system(x)",
        "from os import system",
        "yaml.load_all(f)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_what_is_planted_is_found(planted: str) -> None:
    assert list(findings(planted))


def test_nothing_in_the_package_makes_code_of_data() -> None:
    assert {str(path): found for path in SOURCES if (found := list(findings(path.read_text())))} == {}


def _needs(name: str, seen: set[str]) -> set[str]:
    """A distribution and everything that it pulls in without extras."""
    if name in seen:
        return seen
    seen.add(name)
    for line in importlib.metadata.requires(name) or []:
        if "extra ==" not in line:
            needed = re.match(r"[\w.-]+", line)
            assert needed is not None
            if _is_installed(needed[0]):
                _needs(needed[0].lower(), seen)
    return seen


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_the_core_pulls_in_nothing_heavy_by_whatever_way() -> None:
    needed = _needs("prfaas", set())
    assert {"msgpack", "xxhash"} <= needed
    assert not needed & HEAVY
