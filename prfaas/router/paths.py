"""Which of an engine's paths a client reaches through a door: those for its own requests, not those that change the engine."""

from __future__ import annotations

import re
from typing import Final

# vLLM's paths under /v1 that change an engine for everybody.
_OPERATORS: Final = frozenset(("v1/load_lora_adapter", "v1/unload_lora_adapter"))
_SEPARATOR: Final = re.compile(r"[/\\]")


class PathRefused(Exception):
    """A path that clients may not ask for; the text is for the client."""


def check_path(path: str) -> None:
    """Return when clients may ask for this path, whose percent signs are decoded.

    Raises:
        PathRefused: a segment leads out of where it stands, or the path changes the engine.
    """
    segments = _SEPARATOR.split(path)
    if any(segment in (".", "..") for segment in segments):
        raise PathRefused(f"{path}: a path has no . or .. in it")
    if "/".join(filter(None, segments)) in _OPERATORS:
        raise PathRefused(f"{path}: for operators, at the engine itself")
