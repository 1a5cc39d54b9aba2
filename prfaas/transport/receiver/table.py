"""The transfers that arrive: who may write where, what has landed, how each ends; no socket is read here.

    unknown ──OPEN──▶ asked (the caller decides) ──Accepted──▶ arriving ──last byte──▶ ended, remembered
                                                 ──Rejected──▶ unknown
    asked, arriving ──CANCEL, our cancel, deadline, sender gone, checksum──▶ ended, remembered

Its sender is gone where every connection is that carried anything of it, and it is not opened again in time, for which it is
asked over some that its peer has: one that lost a few connections has others, one that was restarted knows nothing of it.

Memory is free when the transfer has ended and no thread writes to it. Bytes that count are never written over: a chunk
whose bytes are all there goes nowhere, and two connections never write to the same bytes (the later one ends the earlier,
whose sender has evidently given it up).
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Literal

from prfaas.errors import LocalProtocolError, RemoteProtocolError
from prfaas.transport.events import EventQueue
from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import Ending
from prfaas.transport.protocol.wire import HEADER_BYTES, FrameType, Header
from prfaas.transport.ranges import Ranges, Slab
from prfaas.transport.receiver.admission import MAX_PIECES, Admission, EndedTransfers
from prfaas.transport.receiver.api import (
    Accepted,
    OpenRequest,
    ReceiveCompleted,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveMemoryFree,
    Rejected,
)
from prfaas.transport.receiver.assembler import MAX_ATTEMPTS_PER_CHUNK, MAX_CHANGED, Assembler
from prfaas.transport.receiver.transfer import (
    Answer,
    Answers,
    Arrival,
    error_of,
    have_later,
    have_of,
    say,
    say_at_once,
    shortened,
)
from prfaas.types import FailureReason

MAX_REMEMBERED = 4096  # ended transfers, about 400 bytes each
STUCK_MEMORY_SECONDS = 1.0  # a chunk of an ended transfer may take so long to come to its end
RIVAL_SECONDS = 5.0  # for a connection that was aborted to leave the memory
# Of the time that a transfer may have no connection: then, and then again, its sender is asked for it.
CALL_RATIO = 0.25
CALLED_CONNECTIONS = 4  # over which it is asked each time, by the thread that watches all deadlines
HAVE_SECONDS = 0.1  # between two HAVEs of a transfer, each of which may take a hundredth of a second
ChunkOutcome = Literal["whole", "changed", "lost"]
AcceptFunction = Callable[[OpenRequest, Callable[[Accepted | Rejected], None]], None]


class Arrivals:
    """Every transfer that arrives, from any peer. Called from the threads that read connections."""

    def __init__(
        self,
        *,
        accept: AcceptFunction,
        on_event: Callable[[ReceiveEvent], None],
        reconnect_seconds: float,
        max_pieces: int = MAX_PIECES,
        rival_seconds: float = RIVAL_SECONDS,
    ) -> None:
        self._accept = accept
        self._events: EventQueue[ReceiveEvent] = EventQueue(on_event)
        self._reconnect_seconds, self._rival_seconds = reconnect_seconds, rival_seconds
        self._changed = threading.Condition(threading.Lock())
        self._arrivals: dict[bytes, Arrival] = {}
        self._connections: dict[str, dict[Connection, None]] = defaultdict(dict)  # of each peer, in order
        self._admission = Admission(max_pieces=max_pieces)
        self._remembered: EndedTransfers[bytes] = EndedTransfers(MAX_REMEMBERED)
        self._answers = Answers(self._have_of)

    # Opening

    def open(self, connection: Connection, request: OpenRequest) -> None:
        """A peer opens a transfer, or asks again after it lost a connection."""
        with self._changed:
            arrival = self._arrivals.get(request.transfer_id)
            refusal = self._refusal(arrival, request)
            is_new = refusal is None and arrival is None
            if is_new:
                arrival = self._arrivals[request.transfer_id] = self._new(connection, request)
            elif refusal is None and arrival is not None:
                self._again(connection, arrival)
        if refusal is not None:
            say(connection, refusal)
        elif arrival is not None:
            self._tell(arrival)
            if is_new:
                self._accept(request, functools.partial(self._decided, arrival))

    def _refusal(self, arrival: Arrival | None, request: OpenRequest) -> bytes | None:
        """How a transfer of this id has ended already, or why it is not taken; `arrival` is the one that is here."""
        transfer_id, peer = request.transfer_id, request.peer_name
        known = self._remembered.get(peer, transfer_id)
        if known is not None:
            return known
        if arrival is not None:
            if arrival.request.peer_name == peer and not arrival.has_ended:
                return None
            return error_of(transfer_id, "protocol", "a transfer of this id is not yours, or is ending")
        objection = self._admission.objection(request)
        return error_of(transfer_id, "no_memory", objection) if objection else None

    def _new(self, connection: Connection, request: OpenRequest) -> Arrival:
        deadline, answers = time.monotonic() + request.deadline_seconds, EventQueue(self._answers.say)
        return Arrival(request, deadline, answers, self._admission.admit(request), {connection: None})

    def _drop(self, arrival: Arrival) -> None:
        del self._arrivals[arrival.request.transfer_id]
        self._admission.dismiss(arrival.request, arrival.pieces)

    def _again(self, connection: Connection, arrival: Arrival) -> None:
        """Answer another OPEN of a transfer that is here, once the caller has decided; at a later tick if that is often."""
        transfer_id, now = arrival.request.transfer_id, time.monotonic()
        arrival.opened_over(connection)
        if arrival.assembler and now - arrival.had_at >= HAVE_SECONDS:
            arrival.had_at = now
            arrival.answers.put(have_later(transfer_id))
        elif arrival.assembler:
            self._answers.say_later(have_later(transfer_id))

    def _decided(self, arrival: Arrival, decision: Accepted | Rejected) -> None:
        """The caller's answer to an OPEN; the transfer may have ended while it was deciding."""
        transfer_id = arrival.request.transfer_id
        if isinstance(decision, Rejected):
            assembler = None
            frame = messages.encode_ending(FrameType.ERROR, transfer_id, Ending(decision.reason, decision.message))
        else:
            assembler = Assembler(arrival.request.object_bytes, ranges_of(decision.held))
            frame = messages.encode_have(transfer_id, have_of(assembler))
        with self._changed:
            if isinstance(decision, Rejected):
                self._drop(arrival)
            else:
                arrival.accepted, arrival.assembler = decision, assembler
            if not arrival.has_ended:
                is_ending = isinstance(decision, Rejected)
                arrival.answers.put(Answer(transfer_id, arrival.latest_first, frame, is_ending))
            if arrival.assembler is not None:
                self._free(arrival) if arrival.has_ended else self._complete_if_whole(arrival)
        self._tell(arrival)

    # Chunks

    def begin_write(
        self, connection: Connection, peer: str, header: Header, *, wire_bytes: int
    ) -> list[memoryview] | None:
        """Where a chunk goes, nothing where it is checked and not kept, or None when it is not wanted; but for that
        `end_write` must follow.

        `wire_bytes` is what it took on the wire, its header left out.

        Raises:
            RemoteProtocolError: it is no part of what that peer may send.
        """
        slab = header.slab
        with self._changed:
            arrival = self._arrivals.get(header.transfer_id)
            if arrival is None or arrival.has_ended or arrival.assembler is None:
                return None
            if arrival.request.peer_name != peer:
                raise RemoteProtocolError("owner", "a chunk of another peer's transfer")
            arrival.connections[connection] = None
            arrival.alone_since = None
            arrival.wire_bytes += HEADER_BYTES + wire_bytes
            if arrival.assembler.use_of(slab) == "discard":
                return None
            if not arrival.pieces.has_room(arrival.assembler.arrived, slab):
                raise arrival.pieces.refusal()
            self._displace(arrival, slab)
            if arrival.has_ended or arrival.assembler.use_of(slab) == "discard":
                return None
            arrival.writers[connection] = slab
            accepted = arrival.accepted
        assert accepted is not None
        try:
            if accepted.destination is None:
                return []
            views = [accepted.destination(index)[slab.offset : slab.end] for index in range(slab.first, slab.last)]
            if sum(map(len, views)) != slab.num_bytes:
                raise LocalProtocolError(f"the memory of {slab} is too short")
        except BaseException:
            self.end_write(connection, header, "lost")
            raise
        return views

    def _displace(self, arrival: Arrival, slab: Slab) -> None:
        """Have nobody else write to these bytes. The lock is given up meanwhile."""

        def is_alone() -> bool:
            rivals = [its for its, written in arrival.writers.items() if written.overlaps(slab)]
            for rival in rivals:  # each time: of two that wait for one the other may have come before
                rival.abort()
            return not rivals

        if not self._changed.wait_for(is_alone, self._rival_seconds):
            raise RemoteProtocolError("overlap", f"{slab} is still being written by another connection")

    def end_write(self, connection: Connection, header: Header, outcome: ChunkOutcome) -> bool:
        """A chunk was read from the wire whole, came changed, or its connection was lost within it.

        Returns whether the chunk must come again.
        """
        comes_again = False
        with self._changed:
            arrival = self._arrivals[header.transfer_id]
            assert arrival.assembler is not None
            slab = arrival.writers.pop(connection)
            self._changed.notify_all()
            if not arrival.pieces.has_room(
                arrival.assembler.arrived, slab
            ):  # others began while there was room for each
                arrival.assembler.forget()
            if arrival.has_ended:
                self._free(arrival)
            elif outcome == "whole":
                arrival.assembler.landed(slab)
                self._complete_if_whole(arrival)
            elif outcome == "lost":
                arrival.assembler.lost(slab)
            elif outcome == "changed":
                comes_again = arrival.assembler.changed(slab)
                if not comes_again:
                    text = f"{slab} came changed {MAX_ATTEMPTS_PER_CHUNK} times, or {MAX_CHANGED} chunks did"
                    self._fail(arrival, "checksum", text)
            arrival.pieces.recount(arrival.assembler.arrived)
        self._tell(arrival)
        return comes_again

    def what_became_of(self, peer: str, transfer_id: bytes) -> bytes | None:
        """The frame that answers a chunk of a transfer that does not take it any more; None when it does."""
        with self._changed:
            if transfer_id in self._arrivals:
                return None
            known = self._remembered.get(peer, transfer_id)
            return known or Header(FrameType.REOPEN, 0, transfer_id).encode()

    def all_sent(self, peer: str, header: Header) -> None:
        """The sender says that it has sent everything, and how much that is."""
        with self._changed:
            arrival = self._arrivals.get(header.transfer_id)
            if arrival is None or arrival.has_ended or arrival.assembler is None or arrival.request.peer_name != peer:
                return
            if header.offset != arrival.assembler.total_bytes:
                text = f"the sender counts {header.offset} bytes, this side {arrival.assembler.total_bytes}"
                self._fail(arrival, "protocol", text)
        self._tell(arrival)

    # Ending

    def _complete_if_whole(self, arrival: Arrival) -> None:
        """With the lock held."""
        assert arrival.assembler is not None
        if arrival.assembler.missing_bytes:
            return
        self._end(arrival, arrival.done())
        self._events.put(ReceiveCompleted(arrival.request.transfer_id, arrival.stats))
        self._free(arrival)

    def _fail(self, arrival: Arrival, reason: FailureReason, message: str, *, tell_caller: bool = True) -> None:
        """End a transfer without its data; with the lock held."""
        request = arrival.request
        self._end(arrival, error_of(request.transfer_id, reason, message))
        if tell_caller:
            self._events.put(ReceiveFailed(request.transfer_id, request.peer_name, reason, message, arrival.stats))
        self._free(arrival)

    def _end(self, arrival: Arrival, answer: bytes) -> None:
        arrival.ended_at = time.monotonic()
        arrival.answers.put(Answer(arrival.request.transfer_id, list(arrival.connections), answer, is_ending=True))
        self._remembered.put(arrival.request.peer_name, arrival.request.transfer_id, answer)

    def _free(self, arrival: Arrival) -> None:
        """Forget an ended transfer once nobody writes to its memory, nor decides about it."""
        is_mine = self._arrivals.get(arrival.request.transfer_id) is arrival
        if not arrival.writers and arrival.accepted is not None and is_mine:
            self._drop(arrival)
            self._events.put(ReceiveMemoryFree(arrival.request.transfer_id))

    def cancel(self, transfer_id: bytes, reason: FailureReason, message: str) -> None:
        """End a transfer by our own wish: ReceiveFailed does not follow, ReceiveMemoryFree does."""
        with self._changed:
            arrival = self._arrivals.get(transfer_id)
            if arrival is not None and not arrival.has_ended:
                self._fail(arrival, reason, message, tell_caller=False)
        self._tell(arrival)

    def cancelled(self, connection: Connection, peer: str, transfer_id: bytes, ending: Ending) -> None:
        """The sender gave up, perhaps before its OPEN came (they may cross on two connections), and hears how it ended.

        Raises:
            RemoteProtocolError: it gives up more that was never opened than any sender keeps.
        """
        reason, message = ending.reason, shortened(ending.message)
        with self._changed:
            arrival, known = self._arrivals.get(transfer_id), self._remembered.get(peer, transfer_id)
            if arrival is not None and arrival.request.peer_name == peer and not arrival.has_ended:
                arrival.connections[connection] = None
                self._fail(arrival, reason, message)
            elif arrival is None and known is None:
                self._admission.stray(peer)
                known = error_of(transfer_id, reason, message)
                self._remembered.put(peer, transfer_id, known)
                self._events.put(ReceiveFailed(transfer_id, peer, reason, message))
        self._tell(arrival)
        if known is not None:
            say(connection, known)

    def joined(self, connection: Connection, peer: str) -> None:
        """A peer has one more connection; `forget` follows."""
        with self._changed:
            self._connections[peer][connection] = None

    def forget(self, connection: Connection, peer: str) -> None:
        """A connection is gone."""
        now = time.monotonic()
        with self._changed:
            self._connections[peer].pop(connection, None)
            if not self._connections[peer]:
                del self._connections[peer]
            for arrival in self._arrivals.values():
                arrival.lost(connection, now=now)

    def expire(self, now: float) -> None:
        """Fail what is late, take memory from who is stuck in it, ask for what no connection carries, say what nobody took.

        `now` is monotonic seconds.
        """
        with self._changed:
            self._admission.forget_strays(now)
            failed = []
            for arrival in list(self._arrivals.values()):
                if arrival.ended_at is not None and now - arrival.ended_at > STUCK_MEMORY_SECONDS:
                    for writer in arrival.writers:
                        writer.abort()
                reason = arrival.lateness(now, reconnect_seconds=self._reconnect_seconds)
                if reason is not None:
                    self._fail(arrival, reason, f"{arrival.request.peer_name} did not finish: {reason}")
                    failed.append(arrival)
            calls = self._calls(now)
        self._tell(*failed)
        for connection, frame in calls:
            say_at_once(connection, frame)
        self._answers.say_again()

    def _calls(self, now: float) -> list[tuple[Connection, bytes]]:
        """What asks for transfers that have lost their connections, on a few that their peers have, others each time.

        With the lock held.
        """
        calls: list[tuple[Connection, bytes]] = []
        for transfer_id, arrival in self._arrivals.items():
            if arrival.is_called_for(now, each_seconds=CALL_RATIO * self._reconnect_seconds):
                peers = self._connections.get(arrival.request.peer_name, {})
                first, count = arrival.num_calls * CALLED_CONNECTIONS, min(len(peers), CALLED_CONNECTIONS)
                arrival.num_calls += 1
                frame = Header(FrameType.REOPEN, 0, transfer_id).encode()
                calls += [(its, frame) for its in itertools.islice(itertools.cycle(peers), first, first + count)]
        return calls

    def _tell(self, *arrivals: Arrival | None) -> None:
        """What was decided under the lock is said outside of it, by whichever thread: none waits for a peer."""
        self._events.tell()
        for arrival in arrivals:
            if arrival is not None:
                arrival.answers.tell()

    def _have_of(self, transfer_id: bytes) -> Answer | None:
        """A transfer's HAVE as it now is; not made, as it may be long, where no connection takes it. None: it has ended."""
        with self._changed:
            arrival = self._arrivals.get(transfer_id)
            if arrival is None or arrival.has_ended or arrival.assembler is None:
                return None
            connections = arrival.latest_first
        if not any(connection.takes_at_once() for connection in connections):
            return Answer(transfer_id, connections, None)
        with self._changed:
            have = have_of(arrival.assembler)
        return Answer(transfer_id, connections, messages.encode_have(transfer_id, have))


def ranges_of(indices: Collection[int]) -> Ranges:
    """Object indices as ranges."""
    return Ranges((index, index + 1) for index in indices)
