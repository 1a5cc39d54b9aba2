"""One measurement of the twin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """What it must be, and what a peer has in the same run."""

    name: str
    figure: Any
    bar: str
    holds: bool
    peer: Any = None
