"""One measurement of the twin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """Measured figure with its bar, and the figure of a peer in the same run."""

    name: str
    figure: Any
    bar: str
    holds: bool
    peer: Any = None
