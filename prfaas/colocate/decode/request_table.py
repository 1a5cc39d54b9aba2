"""Requests of the decode process, and free KV blocks and state slots (RAPID-Serve, section 4.5.1). No lock is needed."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.processes.messages import Request


class FreeList:
    """Free block ids and state slots; 0 of each is scratch and never given away."""

    def __init__(self, shape: CacheShape) -> None:
        self._blocks = deque(range(1, shape.num_blocks))
        self._slots = deque(range(1, shape.num_state_slots))

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def take_blocks(self, number: int) -> list[int] | None:
        """`number` blocks, or None, and then none is taken."""
        if number > len(self._blocks):
            return None
        return [self._blocks.popleft() for _ in range(number)]

    def take_slot(self) -> int:
        return self._slots.popleft()

    def give_back(self, blocks: list[int], slot: int) -> None:
        self._blocks.extend(blocks)
        self._slots.append(slot)


Phase = Literal["waiting_kv", "waiting_load", "waiting_prefill", "prefill_finished", "running", "leaving"]


@dataclass(eq=False)
class Sequence:
    """`generated` are the tokens since `request.tokens`; `num_scheduled` counts those that steps under way will add."""

    request: Request
    phase: Phase = "waiting_kv"
    blocks: list[int] = field(default_factory=list)
    slot: int = 0
    row: int = -1
    generated: list[int] = field(default_factory=list)
    num_scheduled: int = 0
    cancelled: bool = False
    num_cached: int = 0  # tokens that the blocks hold before prefill
    known_to_prefill: bool = True  # False when prefill has died since and will not be told

    @property
    def id(self) -> int:
        return self.request.request

    @property
    def num_tokens(self) -> int:
        """Return tokens whose place is known, those of steps under way included."""
        return len(self.request.tokens) + self.num_scheduled

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose keys, values and states lie in the blocks once no step is under way: all that went into a step."""
        return len(self.request.tokens) + self.num_scheduled - 1

    @property
    def wants_step(self) -> bool:
        return self.request.num_generated + self.num_scheduled < self.request.max_tokens

    def ended_by(self, token: int) -> bool:
        """Return whether `token`, the last of `generated`, ends the request."""
        length = self.request.num_generated + len(self.generated)
        return token == self.request.stop_token or length >= self.request.max_tokens


class DecodeBook:
    """Mutable; one owner, the decode loop. `hands_over`: what a complete request leaves behind waits for `freed`."""

    def __init__(self, shape: CacheShape, *, max_rows: int, hands_over: bool = False) -> None:
        self._shape, self._hands_over = shape, hands_over
        self._free = FreeList(shape)
        self._sequences: dict[int, Sequence] = {}
        self._waiting: list[tuple[int, Sequence]] = []  # Heap by request id, which is the order of arrival.
        self._finished_prefills: deque[Sequence] = deque()
        self._rows: dict[int, Sequence] = {}
        self._free_rows = list(range(max_rows))  # Heap: low rows first, so that small batches stay narrow.
        self._retiring: list[tuple[int, Sequence]] = []
        self._leaving: dict[int, Sequence] = {}
        self._handovers: list[Sequence] = []

    # --- arrivals and KV

    def add(self, request: Request) -> None:
        sequence = Sequence(request)
        self._sequences[request.request] = sequence
        heapq.heappush(self._waiting, (request.request, sequence))

    def admit(self) -> list[Sequence]:
        """Give the oldest waiting requests their prompt's blocks, as far as they go; the caller sends the ids.

        To the front for those that wait_load, to prefill for the others.

        A block for each request that already holds some stays free, so that running ones need not be preempted at once.
        """
        admitted = []
        while self._waiting and self._free.num_slots:
            sequence = self._waiting[0][1]
            needed = self._shape.blocks_for(len(sequence.request.tokens))
            reserve = sum(sequence.phase != "waiting_kv" for sequence in self._sequences.values())
            if needed + reserve > self._free.num_blocks:
                break
            heapq.heappop(self._waiting)
            sequence.blocks, sequence.slot = self._free.take_blocks(needed) or [], self._free.take_slot()
            sequence.phase = "waiting_load" if sequence.request.num_cached else "waiting_prefill"
            admitted.append(sequence)
        return admitted

    def loaded(self, request: int, num_tokens: int) -> Sequence | None:
        """The blocks hold `num_tokens`; prefill gets the sequence now, or is told to drop it. None: prefill knows nothing."""
        sequence = self._sequences[request]
        sequence.num_cached, sequence.phase = num_tokens, "waiting_prefill"
        if not sequence.known_to_prefill:
            self._forget(sequence)
            return None
        return sequence

    def prefilled(self, request: int, token: int) -> None:
        """The prompt's KV lies in its blocks and `token` follows it."""
        sequence = self._sequences[request]
        sequence.generated.append(token)
        sequence.num_scheduled = 1
        if sequence.cancelled:
            self._forget(sequence)
        elif sequence.ended_by(token):
            del self._sequences[sequence.id]
            self._give_up_blocks(sequence, complete=True)
        else:
            sequence.phase = "prefill_finished"
            self._finished_prefills.append(sequence)

    def dropped(self, request: int) -> None:
        """Prefill will not touch the blocks of a cancelled request any more."""
        sequence = self._sequences.get(request)
        if sequence is not None and sequence.cancelled:
            self._forget(sequence)

    # --- steps

    def join(self) -> list[Sequence]:
        """Give finished prefills a row of the batch, first come first served; they run from the next step on."""
        joined = []
        while self._finished_prefills and self._free_rows:
            sequence = self._finished_prefills.popleft()
            sequence.row, sequence.phase = heapq.heappop(self._free_rows), "running"
            self._rows[sequence.row] = sequence
            joined.append(sequence)
        return joined

    def running(self) -> list[Sequence]:
        """Requests that hold a row, oldest first."""
        return sorted(self._rows.values(), key=lambda sequence: sequence.id)

    def reserve(self, sequence: Sequence) -> bool:
        """Make sure that the next token of a running request has a place; False when no block is free."""
        if self._shape.blocks_for(sequence.num_tokens) <= len(sequence.blocks):
            return True
        more = self._free.take_blocks(1)
        sequence.blocks += more or []
        return more is not None

    def victim(self) -> Sequence:
        """Return the youngest request that prefill does not write to; its blocks are the next to be taken back."""
        return max((*self._rows.values(), *self._finished_prefills), key=lambda sequence: sequence.id)

    def preempt(self, sequence: Sequence) -> Request:
        """Take everything from a request and queue it again with what it generated: the request that prefill gets now.

        Only while no step is under way.
        """
        self._leave(sequence)
        self._free.give_back(sequence.blocks, sequence.slot)
        old = sequence.request
        num_generated = old.num_generated + len(sequence.generated)
        tokens = old.tokens + tuple(sequence.generated)
        again = Request(old.request, num_generated, old.max_tokens, old.stop_token, tokens)
        sequence.phase = "waiting_kv"
        self.add(again)
        return again

    def generated(self, sequence: Sequence, token: int, *, step_under_way: int) -> bool:
        """Take a collected token; False when the request has ended before and the token is surplus."""
        if self._sequences.get(sequence.id) is not sequence:
            return False
        sequence.generated.append(token)
        if sequence.ended_by(token):
            self.retire(sequence, step_under_way=step_under_way)
        return True

    def retire(self, sequence: Sequence, *, step_under_way: int) -> None:
        """End a request now; its blocks are free once step `step_under_way`, which may still write there, is collected."""
        del self._sequences[sequence.id]
        self._leave(sequence)
        self._retiring.append((step_under_way, sequence))

    def collected(self, step: int) -> None:
        """Step `step`, and all before it, have ended: nothing writes to what was retired under them."""
        still = []
        for under_way, sequence in self._retiring:
            if under_way <= step:
                self._give_up_blocks(sequence, complete=not sequence.cancelled)
            else:
                still.append((under_way, sequence))
        self._retiring = still

    def take_handovers(self) -> list[Sequence]:
        """Complete requests whose blocks the front may read now; each is answered by `freed`."""
        handovers, self._handovers = self._handovers, []
        return handovers

    def freed(self, request: int) -> None:
        """The front has read what a request left behind."""
        sequence = self._leaving.pop(request)
        self._free.give_back(sequence.blocks, sequence.slot)

    def cancel(self, request: int, *, step_under_way: int) -> bool:
        """End a request for its client; True when prefill must be told to drop it."""
        sequence = self._sequences.get(request)
        if sequence is None:
            return False
        if sequence.phase == "waiting_kv":
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)
            del self._sequences[request]
            return True
        sequence.cancelled = True
        if sequence.phase == "waiting_prefill":
            return True  # Prefill may be writing to the blocks; its answer frees them.
        if sequence.phase == "waiting_load":
            return False  # The front still reads the blocks; prefill is told after its answer.
        self.retire(sequence, step_under_way=step_under_way)
        return False

    def prefill_lost(self) -> list[Sequence]:
        """Return the requests for a new prefill process, oldest first. Cancelled requests end here."""
        for sequence in [s for s in self._sequences.values() if s.cancelled]:
            if sequence.phase == "waiting_load":
                sequence.known_to_prefill = False
            else:
                self._forget(sequence)
        phases = ("waiting_kv", "waiting_load", "waiting_prefill")
        waiting = [s for s in self._sequences.values() if s.phase in phases and not s.cancelled]
        for sequence in waiting:
            sequence.num_cached = 0  # The dead prefill process may have overwritten the state.
        return sorted(waiting, key=lambda sequence: sequence.id)

    def is_idle(self) -> bool:
        return not self._sequences and not self._retiring and not self._leaving

    @property
    def num_free_blocks(self) -> int:
        return self._free.num_blocks

    def phases(self) -> Counter[Phase]:
        """Return how many requests stand in each phase."""
        return Counter(sequence.phase for sequence in self._sequences.values())

    def _give_up_blocks(self, sequence: Sequence, *, complete: bool) -> None:
        if complete and self._hands_over:
            sequence.phase = "leaving"
            self._leaving[sequence.id] = sequence
            self._handovers.append(sequence)
        else:
            self._free.give_back(sequence.blocks, sequence.slot)

    def _forget(self, sequence: Sequence) -> None:
        """For a request that no step has touched."""
        del self._sequences[sequence.id]
        self._free.give_back(sequence.blocks, sequence.slot)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.phase == "running":
            del self._rows[sequence.row]
            heapq.heappush(self._free_rows, sequence.row)
        elif sequence.phase == "prefill_finished":
            self._finished_prefills.remove(sequence)
