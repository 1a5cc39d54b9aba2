"""Compute shares where there is no GPU: decode runs on the first cores of the machine, prefill on the last ones."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from prfaas.colocate.sides import Side


def cores_of(side: Side, share: float, cores: list[int]) -> list[int]:
    """The cores of a side: decode's share rounded up, prefill the rest, each at least one.

    Shares that add up to one give disjoint sets wherever there are two cores.
    """
    if share >= 1 or len(cores) == 1:
        return cores
    decode_share = share if side == "decode" else 1 - share
    border = min(len(cores) - 1, max(1, math.ceil(decode_share * len(cores) - 1e-9)))
    return cores[:border] if side == "decode" else cores[border:]


class CpuSets:
    """Moves all threads of this process to the cores of its share; computes on at most `max_threads` of them (0: all)."""

    def __init__(self, side: Side, max_threads: int = 0) -> None:
        self._max_threads = max_threads
        self._side, self._cores, self._share = side, sorted(os.sched_getaffinity(0)), 1.0

    def take(self, share: float) -> None:
        """Between steps only; nothing happens when the share is what it was."""
        if share == self._share:
            return
        self._share = share
        cores = cores_of(self._side, share, self._cores)
        torch.set_num_threads(min(len(cores), self._max_threads or len(cores)))
        for thread in Path("/proc/self/task").iterdir():
            try:
                os.sched_setaffinity(int(thread.name), cores)
            except ProcessLookupError:
                continue  # a thread that ended while we looked
