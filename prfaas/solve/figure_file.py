"""A matplotlib figure as a file: of the same figure the same bytes."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

_DPI = 120  # of a PNG


def save(figure: Figure, path: Path) -> Path:
    """Write it as its suffix says, SVG or PNG, without the day and without names drawn by chance; returns the path."""
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, dpi=_DPI, metadata=metadata)
    return path
