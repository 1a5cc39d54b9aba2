"""The decode process's loop: allocate blocks, run the batch one step ahead of its results, send tokens.

Step n+1 is launched before the tokens of step n are read, so the device has no gap. A request that ends in step n is
therefore in step n+1 as well: that surplus token is dropped (RAPID-Serve, section 4.5.2). No lock anywhere: rings in and
out, and words with one writer each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prfaas.colocate.decode.request_table import DecodeBook, Phase, Sequence
from prfaas.colocate.device.runner import KEEP_TOKEN, Row, Runner, Step
from prfaas.colocate.processes.messages import Kind, push_request, read_request
from prfaas.colocate.processes.ring import RingReader, RingWriter
from prfaas.colocate.processes.shared_memory import FULL_SHARE, Board, Word
from prfaas.model.cost.colocation import ShareTable
from prfaas.scheduler.colocation import PartitionState, SharingPolicy, StepLoad, next_sharing, target_partition


@dataclass(frozen=True)
class Adaptation:
    """Inputs of the adaptive resource manager. Without them both sides always use all cores."""

    profile: ShareTable
    policy: SharingPolicy


@dataclass(frozen=True)
class StepUnderWay:
    step: Step
    sequences: list[Sequence]


PHASE_WORDS: dict[Phase, Word] = {
    "waiting_kv": Word.PENDING_KV,
    "waiting_load": Word.WAITING_LOAD,
    "waiting_prefill": Word.WAITING_PREFILL,
    "prefill_finished": Word.PREFILL_FINISHED,
    "running": Word.RUNNING,
}

PeerRings = Callable[[], tuple[RingReader, RingWriter]]


class DecodeLoop:
    """`turn` until the process ends; `peer_rings` fetches the rings to a new prefill process."""

    def __init__(
        self,
        book: DecodeBook,
        runner: Runner,
        board: Board,
        *,
        front: tuple[RingReader, RingWriter],
        peer: tuple[RingReader, RingWriter],
        peer_rings: PeerRings,
        adaptation: Adaptation | None = None,
    ) -> None:
        self._book, self._runner, self._board, self._adaptation = book, runner, board, adaptation
        self._from_front, self._to_front = front
        self._from_prefill, self._to_prefill = peer
        self._peer_rings = peer_rings
        self._sharing = PartitionState()
        self._under_way: StepUnderWay | None = None
        self._num_steps = 0

    def turn(self) -> bool:
        """Take what came, launch one step, collect the one before; False when only a message can give more to do."""
        self._take_messages()
        for sequence in self._book.admit():
            self._send_blocks(sequence)
        self._book.join()
        launched = self._launch()
        self._collect(self._under_way)
        self._under_way = launched
        self._book.collected(self._num_steps if launched is None else self._num_steps - 1)
        for sequence in self._book.take_handovers():
            self._to_front.push(Kind.LEAVE, (sequence.id, sequence.num_kv_tokens, sequence.slot, *sequence.blocks))
        self._show()
        flushed = self._to_front.flush() & self._to_prefill.flush()
        return launched is not None or not flushed

    def _take_messages(self) -> None:
        # A PREFILLED refers to blocks that were sent for a request of the front's ring, so it always finds its request.
        self._take_from_prefill()
        for kind, words in self._from_front.drain():
            if kind == Kind.REQUEST:
                self._book.add(read_request(words))
            elif kind == Kind.CANCEL and self._book.cancel(words[0], step_under_way=self._num_steps):
                self._to_prefill.push(Kind.DROP, words)
            elif kind == Kind.LOADED:
                self._loaded(*words)
            elif kind == Kind.FREE:
                self._book.freed(words[0])
            elif kind == Kind.PEER_RESTARTED:
                self._meet_new_prefill()

    def _loaded(self, request: int, num_tokens: int) -> None:
        sequence = self._book.loaded(request, num_tokens)
        if sequence is not None and sequence.cancelled:
            self._to_prefill.push(Kind.DROP, (request,))
        elif sequence is not None:
            self._send_blocks(sequence)

    def _send_blocks(self, sequence: Sequence) -> None:
        """To whoever writes to them next."""
        if sequence.phase == "waiting_load":
            self._to_front.push(Kind.LOAD, (sequence.id, sequence.slot, *sequence.blocks))
        else:
            self._to_prefill.push(Kind.BLOCKS, (sequence.id, sequence.slot, sequence.num_cached, *sequence.blocks))

    def _show(self) -> None:
        """Write the number of requests in each state to the board."""
        phases = self._book.phases()
        for phase, word in PHASE_WORDS.items():
            self._board[word] = phases[phase]
        self._board[Word.FREE_BLOCKS] = (
            self._book.num_free_blocks
        )  # Written last: when all rows are free, no phase is stale.

    def _take_from_prefill(self) -> None:
        for kind, words in self._from_prefill.drain():
            if kind == Kind.PREFILLED:
                self._book.prefilled(*words)
            else:
                self._book.dropped(words[0])

    def _meet_new_prefill(self) -> None:
        """Keep what the dead prefill process finished. Give the rest to the new process, in the same blocks."""
        self._take_from_prefill()
        self._from_prefill.close()
        self._to_prefill.close()
        self._from_prefill, self._to_prefill = self._peer_rings()
        for sequence in self._book.prefill_lost():
            push_request(self._to_prefill, sequence.request)
            if sequence.phase == "waiting_prefill":
                self._send_blocks(sequence)

    def _launch(self) -> StepUnderWay | None:
        sequences = self._with_room([s for s in self._book.running() if s.wants_step])
        share = self._share(len(sequences))
        if not sequences:
            return None
        rows = [self._row(sequence) for sequence in sequences]
        self._num_steps += 1
        step = self._runner.decode(rows, share=share)
        for sequence in sequences:
            sequence.num_scheduled += 1
        self._board[Word.DECODE_STEPS] = self._num_steps
        return StepUnderWay(step, sequences)

    def _with_room(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return those whose next token has a place; the youngest give theirs up when blocks run out."""
        if all(self._book.reserve(sequence) for sequence in sequences):
            return sequences
        # Blocks can be taken only from requests that no step under way writes to.
        self._collect(self._under_way)
        self._under_way = None
        self._book.collected(self._num_steps)
        ready = []
        for sequence in [s for s in self._book.running() if s.wants_step]:
            while sequence.phase == "running" and not self._book.reserve(sequence):
                self._preempt(self._book.victim())
            ready.append(sequence)
        return [sequence for sequence in ready if sequence.phase == "running"]

    def _preempt(self, victim: Sequence) -> None:
        push_request(self._to_prefill, self._book.preempt(victim))
        self._board.add(Word.PREEMPTIONS)

    def _row(self, sequence: Sequence) -> Row:
        newest_is_known = sequence.num_scheduled == len(sequence.generated)
        token = sequence.generated[-1] if newest_is_known else KEEP_TOKEN
        return Row(sequence.row, token, sequence.num_tokens - 1, sequence.slot, sequence.blocks)

    def _collect(self, under_way: StepUnderWay | None) -> None:
        if under_way is None:
            return
        tokens = under_way.step.tokens()
        words: list[int] = []
        for sequence in under_way.sequences:
            place, token = sequence.request.num_generated + len(sequence.generated), tokens[sequence.row]
            if self._book.generated(sequence, token, step_under_way=self._num_steps):
                words += (sequence.id, place, token)
            else:
                self._board.add(Word.SURPLUS_TOKENS)
        if words:
            self._to_front.push(Kind.TOKENS, words)

    def _share(self, batch: int) -> float:
        """Ask for the next step's partition, and say what a prefill that starts meanwhile may use."""
        self._board[Word.DECODE_BATCH] = batch
        if self._adaptation is None:
            return 1.0
        profile, policy = self._adaptation.profile, self._adaptation.policy
        busy = bool(self._board[Word.PREFILL_BUSY])
        before = self._sharing.partition
        self._sharing = next_sharing(self._sharing, StepLoad(batch, busy), profile, policy=policy)
        partition = self._sharing.partition
        if partition != before:
            self._board.add(Word.SHARE_CHANGES)
        beside = partition if busy else target_partition(StepLoad(batch, True), profile, policy.itl_slo_seconds)[0]
        self._board[Word.DECODE_SHARE] = round(partition.decode_share * FULL_SHARE)
        self._board[Word.PREFILL_SHARE] = round(beside.prefill_share * FULL_SHARE)
        return partition.decode_share
