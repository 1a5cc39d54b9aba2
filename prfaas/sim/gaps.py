"""Inter-token gaps: of a run, equal ones counted together, and of each request."""

from __future__ import annotations

from array import array
from bisect import bisect_right

import numpy as np

from prfaas.model.curve import FloatArray


class Gaps:
    """Seconds between two tokens of a request, each with how many tokens came after such a gap."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._tokens: list[float] = []

    def add(self, seconds: float, num_tokens: float) -> None:
        """So many tokens came so long after the one before; none is nothing."""
        if not num_tokens:
            return
        self._seconds.append(seconds)
        self._tokens.append(num_tokens)

    def arrays(self) -> tuple[FloatArray, FloatArray]:
        """(seconds, tokens)."""
        return np.array(self._seconds), np.array(self._tokens)


class StepLog:
    """How long each step of a batch took, runs of equal ones together."""

    __slots__ = ("_ends", "_seconds")

    def __init__(self) -> None:
        self._ends = array("q", (0,))  # the number of steps by the end of each run
        self._seconds = array("d")

    def add(self, num_steps: int, seconds: float) -> None:
        """So many more steps, each as long."""
        self._ends.append(self._ends[-1] + num_steps)
        self._seconds.append(seconds)

    def between(self, first: int, last: int) -> tuple[FloatArray, FloatArray]:
        """(seconds, steps) of the steps after `first` up to `last`."""
        start, stop = bisect_right(self._ends, first), bisect_right(self._ends, last - 1)
        ends = np.clip(np.array(self._ends[start - 1 : stop + 1]), first, last)
        return np.array(self._seconds[start - 1 : stop]), np.diff(ends).astype(float)
