"""The baseline: chunked hybrid batching. Every pass holds all decoding requests and one chunk of the oldest prompt.

Same model, same cache, same one-step-ahead scheduling as the two processes; what differs is that decode waits for the
chunk (Sarathi-Serve, arXiv 2403.02310; RAPID-Serve, section 2.2).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from prfaas.colocate.decode.request_table import DecodeBook, Sequence
from prfaas.colocate.device.runner import GIVEN, KEEP_TOKEN, POSITION, SLOT, TABLE, Row, fill_inputs
from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.model.model import DecodeRows, HybridModel, PromptPart
from prfaas.colocate.processes.messages import Request


@dataclass(frozen=True)
class Pass:
    """A pass under way: one token per row, and one more when a prompt's last chunk was in it."""

    tokens: torch.Tensor
    rows: list[Sequence]
    num_rows: int
    prefilled: Sequence | None


class Lockstep:
    """`add` requests, then `step` until `is_idle`. Requests end by their length alone, so no token is ever surplus."""

    def __init__(
        self, model: HybridModel, cache: CacheShape, *, chunk_tokens: int, max_rows: int, max_blocks: int
    ) -> None:
        self._model, self._chunk_tokens = model, chunk_tokens
        self._book = DecodeBook(cache, max_rows=max_rows)
        self._device = model.cache.kv.device
        self._inputs = torch.zeros(max_rows, TABLE + max_blocks, dtype=torch.int64)
        self._last = torch.zeros(max_rows, dtype=torch.int64, device=self._device)
        self._prompts: deque[Sequence] = deque()
        self._next_start = 0
        self._under_way: Pass | None = None

    def add(self, request: Request) -> None:
        self._book.add(request)

    def is_idle(self) -> bool:
        return self._book.is_idle() and self._under_way is None

    def step(self) -> list[tuple[int, int]]:
        """Launch one pass, then the (request, token) pairs of the one before it."""
        self._prompts.extend(self._book.admit())
        self._book.join()
        launched = self._launch()
        tokens = self._collect(self._under_way)
        self._under_way = launched
        self._book.collected(0)
        return tokens

    def _launch(self) -> Pass | None:
        sequences = [s for s in self._book.running() if s.wants_step]
        for sequence in sequences:
            if not self._book.reserve(sequence):
                raise MemoryError("the baseline has no preemption: give it more blocks")
        decode = self._decode_rows(sequences)
        prompt, prefilled = self._chunk()
        if decode is None and prompt is None:
            return None
        tokens = self._model.next_tokens(decode, prompt)
        num_rows = 0 if decode is None else len(decode.tokens)
        self._last[:num_rows] = tokens[:num_rows]
        for sequence in sequences:
            sequence.num_scheduled += 1
        return Pass(tokens, sequences, num_rows, prefilled)

    def _decode_rows(self, sequences: list[Sequence]) -> DecodeRows | None:
        if not sequences:
            return None
        rows = []
        for sequence in sequences:
            known = sequence.num_scheduled == len(sequence.generated)
            token = sequence.generated[-1] if known else KEEP_TOKEN
            rows.append(Row(sequence.row, token, sequence.num_tokens - 1, sequence.slot, sequence.blocks))
        inputs = fill_inputs(self._inputs, rows).to(self._device)
        given = inputs[:, GIVEN]
        current = torch.where(given == KEEP_TOKEN, self._last[: len(inputs)], given)
        return DecodeRows(current, inputs[:, POSITION], inputs[:, SLOT], inputs[:, TABLE:])

    def _chunk(self) -> tuple[PromptPart | None, Sequence | None]:
        """Return the next chunk of the oldest prompt, and the prompt when this chunk is its last."""
        if not self._prompts:
            return None, None
        sequence, start = self._prompts[0], self._next_start
        end = min(start + self._chunk_tokens, len(sequence.request.tokens))
        tokens = torch.tensor(sequence.request.tokens[start:end], device=self._device)
        part = PromptPart(tokens, start, sequence.slot, torch.tensor(sequence.blocks, device=self._device))
        ends = end == len(sequence.request.tokens)
        self._next_start = 0 if ends else end
        return part, self._prompts.popleft() if ends else None

    def _collect(self, under_way: Pass | None) -> list[tuple[int, int]]:
        if under_way is None:
            return []
        tokens = under_way.tokens.tolist()
        pairs = []
        for sequence in under_way.rows:
            self._book.generated(sequence, tokens[sequence.row], step_under_way=0)
            pairs.append((sequence.id, tokens[sequence.row]))
        if under_way.prefilled is not None:
            pairs.append((under_way.prefilled.id, tokens[-1]))
            self._book.prefilled(*pairs[-1])
        return pairs
