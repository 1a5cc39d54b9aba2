"""Inter-token gaps of a run, equal ones counted together."""

from __future__ import annotations

import numpy as np

from prfaas.model.curve import FloatArray


class Gaps:
    """Seconds between two tokens of a request, each with how many tokens came after such a gap."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._tokens: list[float] = []

    def add(self, seconds: float, num_tokens: float) -> None:
        """So many tokens came so long after the one before."""
        self._seconds.append(seconds)
        self._tokens.append(num_tokens)

    def arrays(self) -> tuple[FloatArray, FloatArray]:
        """(seconds, tokens)."""
        return np.array(self._seconds), np.array(self._tokens)
