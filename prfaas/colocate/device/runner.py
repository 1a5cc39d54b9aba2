"""Interface between the loops and the device: start a step, and fetch the tokens later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from prfaas.colocate.model.model import DecodeRows, HybridModel
from prfaas.colocate.prefill.queue import Prompt

GIVEN, POSITION, SLOT, TABLE = 0, 1, 2, 3  # Columns of a decode step's inputs; the block table follows.
KEEP_TOKEN = -1  # Use the token of the previous step, which the host may not know yet.


@dataclass(frozen=True)
class Row:
    """One request in a decode step; `token` is KEEP_TOKEN when the step before computed it."""

    row: int
    token: int
    position: int
    slot: int
    blocks: list[int]


class Step(Protocol):
    """Work under way on a device."""

    def done(self) -> bool: ...

    def tokens(self) -> list[int]:
        """Waits; one token per row of the launched batch (idle rows too), or the prompt's one."""
        ...


class Runner(Protocol):
    """The device as one side sees it. Steps of one side run in the order of their launches; shares are in (0, 1]."""

    def decode(self, rows: list[Row], *, share: float) -> Step: ...

    def prefill(self, prompt: Prompt, *, share: float) -> Step: ...


def fill_inputs(inputs: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """Write a step into `inputs` [max rows, 3 + max blocks] and return the part to compute: [rows up to a power of two, ...].

    Sizes go up in powers of two, so that few shapes (on a GPU: few graphs) serve all batches. Idle rows point at scratch.
    """
    height = min(_power_of_two(max(row.row for row in rows) + 1), inputs.shape[0])
    width = min(_power_of_two(max(len(row.blocks) for row in rows)), inputs.shape[1] - TABLE)
    part = inputs[:height, : TABLE + width]
    part.zero_()
    for row in rows:
        head = torch.tensor([row.token, row.position, row.slot, *row.blocks])
        part[row.row, : len(head)] = head
    return part


def decode_step(model: HybridModel, inputs: torch.Tensor, tokens: torch.Tensor) -> None:
    """One step of `inputs` [row, 3 + blocks]; `tokens` [max rows] holds the last step's tokens and then this one's."""
    given, last = inputs[:, GIVEN], tokens[: len(inputs)]
    current = torch.where(given == KEEP_TOKEN, last, given)
    rows = DecodeRows(current, inputs[:, POSITION], inputs[:, SLOT], inputs[:, TABLE:])
    last.copy_(model.next_tokens(rows, None))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
