"""docs/architecture.md agrees with the tree: packages, processes, and the modules of a request and of a KV layer."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
# Modules that are not connected by imports but by shared memory or a socket.
PROCESS_BOUNDARIES = {
    ("prfaas/agent/engine/ring.py", "prfaas/agent/engine/server.py"),
    ("prfaas/transport/net/connection.py", "prfaas/transport/receiver/reader.py"),
}
MAX_MODULES = {"Modules of a request": 8, "Modules of a KV layer": 18}


def section(title: str) -> str:
    return re.split(r"\n#+ ", PAGE.split(f"# {title}\n")[1])[0]


def steps(title: str) -> list[list[str]]:
    """Return the modules of each numbered step of a section."""
    lines = [line for line in section(title).splitlines() if re.match(r"\d+\. ", line)]
    return [re.findall(r"`(prfaas/[\w/]+\.py)`", line) for line in lines]


def imported(module: str) -> set[str]:
    """Return the modules that a module imports, as paths."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {f"{name.replace('.', '/')}.py" for name in names}
    return found


@pytest.mark.parametrize("title", MAX_MODULES)
def test_the_listed_modules_follow_the_imports(title: str) -> None:
    listed = steps(title)
    assert len(listed) <= MAX_MODULES[title] and all(listed)
    before = listed[0]
    reached = set(before)
    for modules in listed[1:]:
        for module in modules:
            is_imported = any(module in imported(earlier) or earlier in imported(module) for earlier in reached)
            is_boundary = any((earlier, module) in PROCESS_BOUNDARIES for earlier in reached)
            assert is_imported or is_boundary, f"{module} is not connected to the modules before it"
        reached |= set(modules)


def test_every_package_is_listed_once() -> None:
    packages = sorted(path.parent.name for path in (ROOT / "prfaas").glob("*/__init__.py"))
    listed = re.findall(r"^\| `prfaas/(\w+)` \|", section("Packages"), flags=re.MULTILINE)
    assert sorted(listed) == packages


def test_every_process_is_listed() -> None:
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    listed = set(re.findall(r"`(prfaas[\w-]*)`", section("Processes")))
    assert set(commands) <= listed
