"""The stand-in for a GPU: steps run on the CPU, at once, on the cores that the side's share allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prfaas.colocate.cpu_affinity import CpuSets
from prfaas.colocate.model import HybridModel, PromptPart
from prfaas.colocate.prefill_queue import Prompt
from prfaas.colocate.runner import TABLE, Row, Step, decode_step, fill_inputs


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
