"""The core depends on few libraries, none of them large."""

import importlib.metadata
import re

HEAVY = {"torch", "vllm", "transformers", "grpcio", "redis", "aiohttp", "numpy"}


def _needs(name: str, seen: set[str]) -> set[str]:
    """Return a distribution and everything that it needs without extras."""
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


def test_the_core_needs_no_large_library_even_indirectly() -> None:
    needed = _needs("prfaas", set())
    assert {"msgpack", "xxhash"} <= needed
    assert not needed & HEAVY
