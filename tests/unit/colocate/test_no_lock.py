"""No lock on the step path: nothing that either side runs can name one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import prfaas.colocate

FOLDER = Path(prfaas.colocate.__file__).parent
LOOPS = ("decode.loop", "prefill.loop", "processes.side")
LOCKING_MODULES = {"threading", "multiprocessing", "asyncio", "queue", "fcntl", "concurrent", "_thread"}
LOCKING_NAMES = {"Lock", "RLock", "Semaphore", "BoundedSemaphore", "Condition", "Barrier", "flock", "lockf", "acquire"}


def imported(tree: ast.AST) -> set[str]:
    plain = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    return plain | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def names(tree: ast.AST) -> set[str]:
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def step_path() -> dict[str, ast.AST]:
    """Return the modules of this package that the sides' loops reach, by name."""
    found: dict[str, ast.AST] = {}
    left = list(LOOPS)
    while left:
        name = left.pop()
        path = FOLDER / f"{name.replace('.', '/')}.py"
        if name not in found and path.is_file():
            found[name] = ast.parse(path.read_text())
            modules = imported(found[name])
            left += [module.removeprefix("prfaas.colocate.") for module in modules if "prfaas.colocate." in module]
    return found


STEP_PATH = step_path()


def test_the_step_path_is_the_loops_and_what_they_stand_on() -> None:
    assert set(STEP_PATH) >= {
        "decode.loop",
        "decode.request_table",
        "prefill.loop",
        "prefill.queue",
        "processes.shared_memory",
        "processes.messages",
        "processes.ring",
    }


@pytest.mark.parametrize("name", sorted(STEP_PATH))
def test_no_module_of_the_step_path_can_take_a_lock(name: str) -> None:
    tree = STEP_PATH[name]
    assert not {module.split(".")[0] for module in imported(tree)} & LOCKING_MODULES
    assert not names(tree) & LOCKING_NAMES


def test_a_lock_would_be_seen() -> None:
    tree = ast.parse("import threading\nlock = threading.Lock()\nlock.acquire()")
    assert imported(tree) & LOCKING_MODULES and names(tree) >= {"Lock", "acquire"}
