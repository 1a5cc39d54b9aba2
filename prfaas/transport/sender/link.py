"""What the connections of a link take from it, and report to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas import logs, metrics
from prfaas.errors import RemoteProtocolError
from prfaas.transport.codec.packing import PackingCost
from prfaas.transport.congestion.connection_policy import LOSS_BASED_CONNECTIONS
from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.congestion.rate_estimator import LinkHealth
from prfaas.transport.congestion.stall_detector import PeerLiveness
from prfaas.transport.events import EventQueue, watch
from prfaas.transport.net import handshake
from prfaas.transport.net.connection import Connection, ConnectionStats, open_connection
from prfaas.transport.net.dialler import Dialler
from prfaas.transport.net.handshake import Identity, capabilities_of
from prfaas.transport.net.tls import Certificates
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import Challenge, Done, Ending, Hello
from prfaas.transport.protocol.wire import Header
from prfaas.transport.ranges import Slab
from prfaas.transport.sender.api import (
    SendCompleted,
    SendEvent,
    SendMemoryFree,
    SendProgress,
    SendRequest,
)
from prfaas.transport.sender.chunker import Chunk
from prfaas.transport.sender.connection_worker import ChunkTask, ConnectionWorker, ConnectionWorkers
from prfaas.transport.sender.outbound_transfer import PeerState
from prfaas.transport.sender.outbox import Outbox
from prfaas.transport.sender.stats import LinkMonitor, LinkPacer, LinkStats
from prfaas.types import FailureReason


@dataclass(frozen=True)
class LinkConfig:
    """How a link is made."""

    num_connections: int = 0  # 0: as many as the round trip asks for
    max_bytes_per_second: float = 0.0  # of payload and frames, over all connections; 0: as fast as the link allows
    congestion_control: str = "bbr"
    reconnect_seconds: float = 3.0
    certificates: Certificates | None = None  # None: unencrypted, which public addresses must allow
    insecure_plaintext: bool = False
    budgets: tuple[RateBudget, ...] = ()  # shared with other links
    packs: bool = True  # chunks are compressed while that makes the link faster
    lossy_fp8: bool = False  # what may be cast is, to half its bytes, where the peer agrees: LOSSY
    awaits_peer: bool = False  # it is the peer that dials, to receive; this side never does


class LinkWork:
    """A `line.Work`, called from the threads of every line. Events are told with none of its locks held."""

    def __init__(
        self,
        changed: threading.Condition,
        *,
        outbox: Outbox,
        lines: ConnectionWorkers,
        gauge: LinkMonitor,
        events: EventQueue[SendEvent],
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

    def has_work(self, line: ConnectionWorker, timeout_seconds: float) -> bool:
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

    def take(self, line: ConnectionWorker) -> bytes | ChunkTask | None:
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
                return ChunkTask(*taken, None, is_trial=False)
            packing = self._gauge.packing
            return ChunkTask(*taken, packing.way, is_trial=line.can_pack and packing.wants_trial())

    def sent(self, line: ConnectionWorker, chunk: Chunk, samples: Sequence[PackingCost]) -> None:
        """The line has read the chunk's memory for the last time; `samples`: what packing it took."""
        with self._changed:
            line.reads = None
            if self._outbox.sent(chunk):
                self._changed.notify_all()
            self._gauge.packing.learn(samples)
        self._events.tell()

    def acknowledged(self, line: ConnectionWorker, landed: list[Chunk], changed: list[Chunk]) -> None:
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

    def have(self, line: ConnectionWorker, header: Header, payload: bytearray) -> None:
        """The peer has accepted a transfer and says what it holds; all else that is ready leaves.

        Nothing is made of one that nobody has asked for, and of others one at a time: it may become many times as long.
        """
        with self._hearing:
            with self._changed:
                sizes = self._outbox.sizes_of(header.transfer_id)
            if sizes is None:
                return
            have = messages.decode_have(header, payload, num_objects=len(sizes))
            standing = PeerState.of(have, sizes)
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

    def may_send(self, line: ConnectionWorker, bytes_per_second: int) -> None:
        """The peer says what all connections may send to it together."""
        with self._changed:
            if line.generation == self._lines.generation:
                self._heed_rate(bytes_per_second)

    def wake(self) -> None:
        """Have every line look at what there is to do."""
        with self._changed:
            self._changed.notify_all()


_log = logs.get("transport")
TICK_SECONDS, IDLE_TICK_SECONDS = 0.05, 0.25
STUCK_MEMORY_SECONDS = 1.0
ANSWER_SECONDS, ANSWER_ROUND_TRIPS = 1.0, 4  # whichever is longer: an answer that takes more is asked for again
MAX_DIALLED_CONNECTIONS = LOSS_BASED_CONNECTIONS  # by a peer that dials to receive
NOT_DIALLED = "(it dials this agent, and has no connection)"


class Link:
    """The sending end towards one peer. Connects at the first transfer and stays connected."""

    def __init__(
        self,
        address: str,
        *,
        config: LinkConfig,
        local_name: str,
        peer_name: str,
        key: bytes,
        on_event: Callable[[SendEvent], None],
    ) -> None:
        """Events come from the link's threads, in order, with none of its locks held."""
        self.address = address
        self._config = config
        capabilities = capabilities_of(packs=config.packs, lossy_fp8=config.lossy_fp8)
        self._identity = Identity(local_name, key, capabilities=capabilities)
        self._peer_name = peer_name
        self._events: EventQueue[SendEvent] = EventQueue(on_event)
        self._changed = threading.Condition(threading.Lock())
        self._dialler = Dialler(
            self._changed,
            connect=self._connect_once,
            is_busy=lambda: config.awaits_peer or self._outbox.is_busy,
            peer_name=peer_name,
            num_connections=config.num_connections,
        )
        self._outbox = Outbox(self._put_event, num_connections=self._dialler.num_wanted)
        self._dialler.last_error = NOT_DIALLED if config.awaits_peer else ""
        self._gauge = LinkMonitor()
        self._num_stalls = metrics.LINK_STALLS.labels(peer=peer_name)  # from 0 on, so that the first shows
        self._pacing = LinkPacer(config.max_bytes_per_second, config.budgets, peer_name=peer_name)
        self._lines = ConnectionWorkers()
        self._work = LinkWork(
            self._changed,
            outbox=self._outbox,
            lines=self._lines,
            gauge=self._gauge,
            events=self._events,
            is_wanted=self._dialler.is_wanted,
            heed_rate=self._heed_rate,
        )
        self._reach = PeerLiveness(now=time.monotonic())
        self._watcher = threading.Thread(target=self._watch_forever, name=f"watch-{peer_name}", daemon=True)

    def _put_event(self, event: SendEvent) -> None:
        self._events.put(event)
        if isinstance(event, SendMemoryFree):
            self._dialler.used()
        elif isinstance(event, SendProgress | SendCompleted):
            self._reach.progressed(now=time.monotonic())

    # What the agent says

    def open(self, transfer: SendRequest) -> None:
        """Offer a transfer to the peer. What `ready` names leaves once the peer has said what it holds."""
        with self._changed:
            self._outbox.open(transfer, now=time.monotonic())
            self._gauge.opened()
            if self._dialler.is_closed.is_set():
                self._outbox.fail_all("shutdown", "this agent stops", now=time.monotonic())
            elif not self._start():
                self._outbox.fail_all("no_memory", "there is no thread for this link", now=time.monotonic())
            self._changed.notify_all()
        self._events.tell()

    def _start(self) -> bool:
        """Watch from here on, and dial; False: there is no thread to watch, and so nothing that would end in time."""
        if self._watcher.ident is None:
            try:
                self._watcher.start()
            except RuntimeError:
                return False
            self._reach.progressed(now=time.monotonic())  # what came before nobody has watched
            self._dial()
        return True

    def _dial(self) -> None:
        if not self._config.awaits_peer:
            self._dialler.start()

    def ready(
        self, transfer_id: bytes, *, first_object: int, num_objects: int, offset_bytes: int, length_bytes: int
    ) -> None:
        """This byte range of each of these objects may leave now."""
        with self._changed:
            slab = Slab(first_object, num_objects, offset_bytes, length_bytes)
            if self._outbox.ready(transfer_id, slab, now=time.monotonic()):
                self._changed.notify_all()
        self._events.tell()

    def prioritise(self, transfer_id: bytes, priority: int) -> None:
        """A transfer has become more urgent (a lower `priority`), or less; one that has ended stays as it is."""
        with self._changed:
            self._outbox.prioritise(transfer_id, priority)

    def cancel(self, transfer_id: bytes, reason: FailureReason, message: str) -> None:
        """End a transfer; SendFailed and SendMemoryFree follow, the peer hears of it."""
        with self._changed:
            self._outbox.cancel(transfer_id, Ending(reason, message), now=time.monotonic())
            self._changed.notify_all()
        self._events.tell()

    def decline(self, transfer_id: bytes, reason: FailureReason, message: str, *, deadline_seconds: float) -> None:
        """Tell the peer that a transfer will not be opened, which it may await for so long; no event follows."""
        with self._changed:
            deadline = time.monotonic() + deadline_seconds
            self._outbox.decline(transfer_id, Ending(reason, message), deadline=deadline)
            if not self._dialler.is_closed.is_set():
                self._start()
            self._changed.notify_all()

    def close(self) -> None:
        """End every transfer and every thread."""
        with self._changed:
            self._dialler.is_closed.set()
            self._outbox.fail_all("shutdown", "this agent stops", now=time.monotonic())
            self._lines.abort()
            self._changed.notify_all()
        self._events.tell()
        self._dialler.join()
        if self._watcher.ident is not None:
            self._watcher.join()
        self._pacing.leave_budgets(self)  # not before: the watcher asks for shares

    @property
    def peer_process(self) -> bytes | None:
        """Names the process that answers at the peer, while there is a connection to it."""
        with self._changed:
            return self._lines.process if self._lines else None

    def is_idle(self, now: float) -> bool:
        """Whether nothing is lost with this link: nobody has used it for long; `now` is monotonic seconds."""
        with self._changed:
            return self._dialler.is_idle(now)

    def snapshot(self) -> LinkStats:
        """The link's figures; costs a few microseconds a connection."""
        with self._changed:
            is_down = not self._lines and bool(self._dialler.last_error) and self._dialler.is_wanted()
            return self._gauge.state(
                self._lines, self._outbox, peer=self._peer_name, address=self.address, is_down=is_down
            )

    def connections(self) -> list[ConnectionStats]:
        """The figures of each of its connections, the oldest first."""
        with self._changed:
            now = time.monotonic()
            states = [state for line in self._lines if (state := line.state(now)) is not None]
        return sorted(states, key=lambda its: -its.age_seconds)

    # Probes

    def begin_probe(self) -> None:
        """What is opened next is to show what the link carries."""
        with self._changed:
            self._gauge.begin_probe()

    @property
    def has_found(self) -> bool:
        """Whether the probe under way has found what the link carries."""
        with self._changed:
            return self._gauge.has_found

    def end_probe(self) -> LinkHealth:
        """What the probe has found."""
        with self._changed:
            self._gauge.end_probe(time.monotonic())
            if self._outbox.num_transfers > 1:  # transfers have been opened meanwhile
                self._gauge.opened()
            return self._gauge.health

    # Watching

    def _watch_forever(self) -> None:
        watch(
            self._watch,
            is_closed=self._dialler.is_closed,
            pause_seconds=lambda: TICK_SECONDS if self._outbox.num_transfers else IDLE_TICK_SECONDS,
            log_failure=lambda: _log.exception("link.watch_failed", peer=self._peer_name),
        )

    def _watch(self, now: float) -> None:
        self._end_late(now)
        self._ask_again(now)
        self._free_stuck_memory(now)
        self._measure()
        self._end_stalled(now)

    def _end_late(self, now: float) -> None:
        patience = self._config.reconnect_seconds
        with self._changed:
            is_owed = self._outbox.is_owed and not self._lines.is_any_slow(now)
            is_gone = self._reach.gone_seconds(now=now, is_connected=bool(self._lines), is_owed=is_owed) >= patience
            late = self._outbox.late(now=now, unreachable_before=now - patience if is_gone else float("-inf"))
        for transfer_id, reason in late:
            message = f"{self._peer_name} at {self.address} did not take it in time {self._dialler.last_error}"
            self.cancel(transfer_id, reason, message.rstrip())

    def _ask_again(self, now: float) -> None:
        with self._changed:
            patience = max(ANSWER_SECONDS, ANSWER_ROUND_TRIPS * self._lines.rtt_seconds)
            if self._outbox.ask_again(now=now, patience_seconds=patience, leaving=self._lines.leaving(now)):
                self._changed.notify_all()

    def _free_stuck_memory(self, now: float) -> None:
        """A peer that takes nothing does not keep an ended transfer's memory: the connection goes."""
        with self._changed:
            self._lines.abort_readers(self._outbox.stuck(ended_before=now - STUCK_MEMORY_SECONDS))

    def _measure(self) -> None:
        with self._changed:  # which may take a while on a busy host, and bytes are counted now
            carried = self._gauge.measure(time.monotonic(), self._lines, self._outbox)
            if carried is not None and not self._config.awaits_peer:
                self._dialler.count_anew(carried, rtt_seconds=self._gauge.min_rtt_seconds)
                self._outbox.set_num_connections(self._dialler.num_wanted)
            self._dial()  # what no thread could be started for
            use = self._gauge.use(is_busy=self._outbox.num_transfers > 0)
            self._pacing.follow_budgets(self, use, self._lines, now=time.monotonic())
            self._fit_chunks()
            self._pacing.log_chunks()

    def _end_stalled(self, now: float) -> None:
        """Have what a stalled connection carries leave over the others."""
        with self._changed:
            stalled, unheard = self._lines.stalled(now)
            for line in stalled:
                _log.warning("link.stalled", peer=self._peer_name, unacknowledged_bytes=line.in_flight_bytes)
                self._num_stalls.inc()
                line.abort()
        for line in unheard:
            line.ping()

    # Lines come and go

    def _connect_once(self, number: int) -> None:
        """Serve one connection until it is lost, by the peer's going or by our closing."""
        with open_connection(self.address, self._config) as connection:
            try:
                challenge = handshake.dial(connection, self._identity, peer_name=self._peer_name)
                self._serve(connection, challenge, number)
            except RemoteProtocolError as error:
                metrics.WIRE_REFUSALS.labels(reason=error.reason).inc()
                connection.try_write(messages.encode_refusal(error))
                raise

    def serve(self, connection: Connection, hello: Hello) -> None:
        """Send over a connection that the peer has dialled, until it is lost.

        Raises:
            RemoteProtocolError: the peer breaks the protocol.
        """
        with self._changed:
            if self._dialler.is_closed.is_set() or not self._start():
                return
            number = len(self._lines)
        self._serve(connection, hello, number)

    def _serve(self, connection: Connection, said: Challenge | Hello, number: int) -> None:
        line = self._connected(connection, said, number)
        if line is None:
            return
        began_at = time.monotonic()
        try:
            line.run()
        except OSError as error:
            self._dialler.lost_by(error)
        except RemoteProtocolError as error:
            self._dialler.lost_by(error)
            raise
        finally:
            self._lost(line, lived_seconds=time.monotonic() - began_at)

    def _connected(self, connection: Connection, said: Challenge | Hello, number: int) -> ConnectionWorker | None:
        """A line for a new connection, or None when there are enough."""
        with self._changed:
            if self._lines.lead_to(said.boot_id):  # what another process acknowledged is lost
                self._outbox.connection_lost(is_last=True)
                self._heed_rate(0.0)
            if self._config.awaits_peer:
                self._dialler.num_wanted = min(number + 1, MAX_DIALLED_CONNECTIONS)
            elif not self._lines:
                self._dialler.count_by(connection)
            self._outbox.set_num_connections(self._dialler.num_wanted)
            if number >= self._dialler.num_wanted:
                return None
            capabilities = tuple(set(said.capabilities) & set(self._identity.capabilities))
            connection.choose_low_water()
            line = ConnectionWorker(
                self._work, connection, generation=self._lines.generation, capabilities=capabilities
            )
            self._lines.add(line)
            self._dialler.last_error = ""
            self._share_rate()
            if self._dialler.is_closed.is_set():
                line.abort()
            return line

    def _share_rate(self) -> None:
        self._pacing.divide(self._lines)
        self._fit_chunks()
        self._pacing.log_chunks()

    def _heed_rate(self, bytes_per_second: float) -> None:
        """Send no faster than the peer wants; 0: it does not say. The log has it at the next look: a peer may say much."""
        self._pacing.told(bytes_per_second, self._lines)
        self._fit_chunks()

    def _fit_chunks(self) -> None:
        achievable = self._gauge.health.achievable_bytes_per_second
        self._pacing.fit_chunks(self._outbox, achievable_bytes_per_second=achievable, num_connections=len(self._lines))

    def _lost(self, line: ConnectionWorker, *, lived_seconds: float) -> None:
        """A connection went: what it carried goes to the others."""
        with self._changed:
            self._lines.remove(line)
            self._gauge.bounds.restart(self._lines.in_flight_bytes, now=time.monotonic())
            self._share_rate()
            self._reach.lost(now=time.monotonic(), lived_seconds=lived_seconds)
            if not self._lines:
                self._heed_rate(0.0)  # another process may answer next
                self._dialler.last_error = NOT_DIALLED if self._config.awaits_peer else self._dialler.last_error
            self._outbox.connection_lost(is_last=not self._lines)
            if line.generation == self._lines.generation:
                self._outbox.put_back(line.unacknowledged())
            self._changed.notify_all()
