"""The two sides of the executor."""

from __future__ import annotations

from typing import Literal

Side = Literal["prefill", "decode"]
SIDES: tuple[Side, Side] = ("prefill", "decode")
