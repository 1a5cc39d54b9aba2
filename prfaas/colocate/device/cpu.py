"""Compute shares where there is no GPU: decode runs on the first cores of the machine, prefill on the last ones."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from prfaas.colocate.device.runner import TABLE, Row, Step, decode_step, fill_inputs
from prfaas.colocate.model.model import HybridModel, PromptPart
from prfaas.colocate.prefill.queue import Prompt
from prfaas.colocate.processes.shared_memory import Side


def cores_of(side: Side, share: float, cores: list[int]) -> list[int]:
    """Return the cores of a side: decode's share rounded up, prefill the rest, each at least one.

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
                continue  # The thread ended meanwhile.


@dataclass(frozen=True)
class FinishedStep:
    result: list[int]

    def done(self) -> bool:
        return True

    def tokens(self) -> list[int]:
        return self.result


class CpuRunner:
    """One side's; `sets` is None when both sides may use every core."""

    def __init__(self, model: HybridModel, *, max_rows: int, max_blocks: int, sets: CpuSets | None = None) -> None:
        self._model, self._sets = model, sets
        self._inputs = torch.zeros(max_rows, TABLE + max_blocks, dtype=torch.int64)
        self._tokens = torch.zeros(max_rows, dtype=torch.int64)

    def decode(self, rows: list[Row], *, share: float) -> Step:
        self._take(share)
        inputs = fill_inputs(self._inputs, rows)
        decode_step(self._model, inputs, self._tokens)
        return FinishedStep(self._tokens[: len(inputs)].tolist())

    def prefill(self, prompt: Prompt, *, share: float) -> Step:
        self._take(share)
        tokens = torch.tensor(prompt.request.tokens[prompt.num_cached :])
        part = PromptPart(tokens, prompt.num_cached, prompt.slot, torch.tensor(prompt.blocks))
        return FinishedStep(self._model.next_tokens(None, part).tolist())

    def _take(self, share: float) -> None:
        if self._sets is not None:
            self._sets.take(share)
