"""What the connections of a link take from it, and report to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from prfaas.transport import messages
from prfaas.transport.chunker import Chunk
from prfaas.transport.line import Line, Taken
from prfaas.transport.lines import Lines
from prfaas.transport.link_gauge import LinkGauge
from prfaas.transport.messages import Done, Ending
from prfaas.transport.ordered_events import OrderedEvents
from prfaas.transport.outbound import SendEvent
from prfaas.transport.outbox import Outbox
from prfaas.transport.packing_choice import PackSample
from prfaas.transport.standing import Standing
from prfaas.transport.wire import Header


class LinkWork:
    """A `line.Work`, called from the threads of every line. Events are told with none of its locks held."""

    def __init__(
        self,
        changed: threading.Condition,
        *,
        outbox: Outbox,
        lines: Lines,
        gauge: LinkGauge,
        events: OrderedEvents[SendEvent],
        is_wanted: Callable[[], bool],
        heed_rate: Callable[[int], None],
    ) -> None:
        """`changed` has the link's lock, which guards all of these; `is_wanted`: connections are kept although idle;
        `heed_rate`: send no more bytes a second than that.
        """
        self._changed = changed
        self._hearing = threading.Lock()  # held by whoever takes a HAVE apart
        self._outbox, self._lines, self._gauge, self._events = outbox, lines, gauge, events
        self._is_wanted, self._heed_rate = is_wanted, heed_rate

    def has_work(self, line: Line, timeout_seconds: float) -> bool:
        """Whether there is something to send; False when nothing came up in time.

        Raises:
            OSError: the line is dead, or nobody has wanted it for long.
        """
        end = time.monotonic() + timeout_seconds
        with self._changed:
            while line.is_alive and self._is_wanted():
                if self._outbox.has_work():
                    return True
                now = time.monotonic()
                if now >= end:
                    return False
                self._changed.wait(end - now)
        raise ConnectionAbortedError("the connection was lost, or is not wanted")

    def take(self, line: Line) -> bytes | Taken | None:
        """What leaves next: a control frame, or bytes, whose memory is in use until `sent`."""
        with self._changed:
            now = time.monotonic()
            if not line.is_alive:
                return None
            said = self._outbox.next_frame(now=now)
            if said is not None:
                line.says, frame = said
                return frame
            taken = self._outbox.take()
            if taken is None:
                return None
            line.reads, line.says = taken[0].transfer_id, None
            self._gauge.bounds.handed(taken[0].slab.num_bytes, now=now)
            if self._gauge.is_probing:  # its bytes say nothing of what packing would bring
                return Taken(*taken, None, is_trial=False)
            packing = self._gauge.packing
            return Taken(*taken, packing.way, is_trial=line.can_pack and packing.wants_trial())

    def sent(self, line: Line, chunk: Chunk, samples: Sequence[PackSample]) -> None:
        """The line has read the chunk's memory for the last time; `samples`: what packing it took."""
        with self._changed:
            line.reads = None
            if self._outbox.sent(chunk):
                self._changed.notify_all()
            self._gauge.packing.learn(samples)
        self._events.tell()

    def acknowledged(self, line: Line, landed: list[Chunk], changed: list[Chunk]) -> None:
        """Chunks have arrived whole, and others changed, which leave again."""
        now = time.monotonic_ns()
        with self._changed:
            if line.generation != self._lines.generation:
                return
            num_bytes = sum(chunk.slab.num_bytes for chunk in (*landed, *changed))
            self._gauge.bounds.landed(num_bytes, rtt_seconds=self._gauge.min_rtt_seconds, now=now * 1e-9)
            self._outbox.landed(landed, time_ns=now)
            if changed:
                self._outbox.put_back(changed)
                self._changed.notify_all()
        self._events.tell()

    def have(self, line: Line, header: Header, payload: bytearray) -> None:
        """The peer has accepted a transfer and says what it holds; all else that is ready leaves.

        Nothing is made of one that nobody has asked for, and of others one at a time: it may become many times as long.
        """
        with self._hearing:
            with self._changed:
                sizes = self._outbox.sizes_of(header.transfer_id)
            if sizes is None:
                return
            have = messages.decode_have(header, payload, num_objects=len(sizes))
            standing = Standing.of(have, sizes)
            with self._changed:
                if line.generation == self._lines.generation and self._lines.process is not None:
                    now = time.monotonic()
                    self._outbox.have(header.transfer_id, standing, process=self._lines.process, now=now)
                    self._changed.notify_all()
        self._events.tell()

    def done(self, transfer_id: bytes, done: Done) -> None:
        """The peer has every byte. The last acknowledgements may come after this."""
        with self._changed:
            self._outbox.done(transfer_id, done, now=time.monotonic())
        self._events.tell()

    def refused(self, transfer_id: bytes, ending: Ending) -> None:
        """The peer gives a transfer up, or does not take it."""
        with self._changed:
            self._outbox.refused(transfer_id, ending, now=time.monotonic())
        self._events.tell()

    def reopen(self, transfer_id: bytes) -> None:
        """The peer does not know a transfer that it was sent chunks of."""
        with self._changed:
            self._outbox.reopen(transfer_id)
            self._changed.notify_all()

    def may_send(self, line: Line, bytes_per_second: int) -> None:
        """The peer says what all connections may send to it together."""
        with self._changed:
            if line.generation == self._lines.generation:
                self._heed_rate(bytes_per_second)

    def wake(self) -> None:
        """Have every line look at what there is to do."""
        with self._changed:
            self._changed.notify_all()
