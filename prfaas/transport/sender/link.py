"""Sending end of a link: transfers go in, chunks leave over its connections, and events come out."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas import logs, metrics
from prfaas.errors import RemoteProtocolError
from prfaas.transport.codec.packing import PackingCost
from prfaas.transport.congestion.connection_policy import LOSS_BASED_CONNECTIONS
from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.congestion.stall_detector import PeerLiveness
from prfaas.transport.events import EventQueue, check_repeatedly
from prfaas.transport.net import handshake
from prfaas.transport.net.connection import HEARTBEAT_SECONDS, SILENCE_SECONDS, Connection, WireConfig, open_connection
from prfaas.transport.net.dialler import Dialler
from prfaas.transport.net.handshake import Identity, capabilities_of
from prfaas.transport.protocol import messages
from prfaas.transport.protocol.messages import Challenge, EndReason, Hello, TransferStats
from prfaas.transport.protocol.wire import Header
from prfaas.transport.ranges import Slab
from prfaas.transport.sender.api import SendCompleted, SendEvent, SendMemoryFree, SendProgress, SendRequest
from prfaas.transport.sender.chunker import Chunk
from prfaas.transport.sender.connection_worker import ChunkTask, ConnectionWorker, ConnectionWorkers
from prfaas.transport.sender.outbound_transfer import PeerState
from prfaas.transport.sender.outbox import Outbox
from prfaas.transport.sender.stats import LinkMonitor, LinkStats
from prfaas.types import FailureReason

_log = logs.get("transport")
TICK_SECONDS, IDLE_TICK_SECONDS = 0.05, 0.25
STUCK_MEMORY_SECONDS = 1.0
# OPEN is repeated after the longer of these.
ANSWER_SECONDS, ANSWER_ROUND_TRIPS = 1.0, 4
MAX_DIALLED_CONNECTIONS = LOSS_BASED_CONNECTIONS  # Limit for a peer that dials to receive.
NOT_DIALLED = "(it dials this agent, and has no connection)"
PACE_STEP_RATIO = 0.02  # Smaller changes of the rate are not passed to the kernel.


@dataclass(frozen=True)
class LinkConfig(WireConfig):
    """Settings of a link."""

    num_connections: int = 0  # Number of connections; 0 lets the round-trip time decide.
    budgets: tuple[RateBudget, ...] = ()  # Rate budgets that the link shares with others.
    weight_of_tenant: Callable[[str], float] = lambda tenant: 1.0
    packs: bool = True  # Pack chunks while that makes the link faster.
    awaits_peer: bool = False  # The peer dials in order to receive; this side never dials.


class Link:
    """Sending end towards one peer. Connects at the first transfer and stays connected.

    One lock guards the outbox, the workers, the monitor and the dialler. Events are delivered in order, from the link's
    threads, without the lock.
    """

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
        """Create a link without threads or connections."""
        self.address = address
        self._config = config
        self._identity = Identity(local_name, key, capabilities=capabilities_of(packs=config.packs))
        self._peer_name = peer_name
        self._events: EventQueue[SendEvent] = EventQueue(on_event)
        self._changed = threading.Condition(threading.Lock())
        self._decoding_have = threading.Lock()
        self._dialler = Dialler(
            self._changed,
            connect=self._connect_once,
            is_busy=lambda: config.awaits_peer or self._outbox.is_busy,
            peer_name=peer_name,
            num_connections=config.num_connections,
        )
        self._dialler.last_error = NOT_DIALLED if config.awaits_peer else ""
        self._outbox = Outbox(
            self._put_event, num_connections=self._dialler.num_wanted, weight_of=config.weight_of_tenant
        )
        self._workers = ConnectionWorkers()
        self._monitor = LinkMonitor()
        self._peer_liveness = PeerLiveness(now=time.monotonic())
        self._pace = math.inf  # Bytes per second over all connections.
        # Created at once, so that the counter exists before the first stall.
        self._num_stalls = metrics.LINK_STALLS.labels(peer=peer_name)
        self._watcher = threading.Thread(target=self._watch_forever, name=f"watch-{peer_name}", daemon=True)

    def _put_event(self, event: SendEvent) -> None:
        self._events.put(event)
        if isinstance(event, SendMemoryFree):
            self._dialler.used()
        elif isinstance(event, SendProgress | SendCompleted):
            self._peer_liveness.progressed(now=time.monotonic())

    # Transfers, called by the agent

    def open(self, request: SendRequest) -> None:
        """Offer a transfer to the peer. Bytes leave once they are ready and the peer has reported what it holds."""
        with self._changed:
            self._outbox.open(request, now=time.monotonic())
            if self._dialler.is_closed.is_set():
                self._outbox.fail_all("shutdown", "this agent stops", now=time.monotonic())
            elif not self._start():
                self._outbox.fail_all("no_memory", "no thread can be started for this link", now=time.monotonic())
            self._changed.notify_all()
        self._events.deliver()

    def ready(
        self, transfer_id: bytes, *, first_object: int, num_objects: int, offset_bytes: int, length_bytes: int
    ) -> None:
        """Mark a byte range of each of these objects as ready to leave."""
        with self._changed:
            slab = Slab(first_object, num_objects, offset_bytes, length_bytes)
            if self._outbox.ready(transfer_id, slab, now=time.monotonic()):
                self._changed.notify_all()
        self._events.deliver()

    def cancel(self, transfer_id: bytes, reason: FailureReason, message: str) -> None:
        """End a transfer and tell the peer. SendFailed and SendMemoryFree follow."""
        with self._changed:
            self._outbox.cancel(transfer_id, EndReason(reason, message), now=time.monotonic())
            self._changed.notify_all()
        self._events.deliver()

    def decline(self, transfer_id: bytes, reason: FailureReason, message: str, *, deadline_seconds: float) -> None:
        """Tell the peer that a transfer, which it may await for `deadline_seconds`, will not be opened. Has no events."""
        with self._changed:
            deadline = time.monotonic() + deadline_seconds
            self._outbox.decline(transfer_id, EndReason(reason, message), deadline=deadline)
            if not self._dialler.is_closed.is_set():
                self._start()
            self._changed.notify_all()

    def close(self) -> None:
        """End every transfer and every thread."""
        with self._changed:
            self._dialler.is_closed.set()
            self._outbox.fail_all("shutdown", "this agent stops", now=time.monotonic())
            self._workers.abort()
            self._changed.notify_all()
        self._events.deliver()
        self._dialler.join()
        if self._watcher.ident is not None:
            self._watcher.join()
        # The watcher asks the budgets for shares, so it must have ended.
        for budget in self._config.budgets:
            budget.forget(self)

    def _start(self) -> bool:
        """Start the watcher and dial. Returns False if no thread can be started, so that no deadline would hold."""
        if self._watcher.ident is None:
            try:
                self._watcher.start()
            except RuntimeError:
                return False
            # Nobody watched the time before.
            self._peer_liveness.progressed(now=time.monotonic())
            self._take_budget_shares()
            self._dial()
        return True

    def _dial(self) -> None:
        if not self._config.awaits_peer:
            self._dialler.start()

    # Status, called by the agent

    def is_idle(self, now: float) -> bool:
        """Return whether nobody has used the link for long; `now` is monotonic seconds."""
        with self._changed:
            return self._dialler.is_idle(now)

    def snapshot(self) -> LinkStats:
        """Return the link's figures. Costs a few microseconds per connection."""
        with self._changed:
            is_down = not self._workers and bool(self._dialler.last_error) and self._dialler.is_wanted()
            return self._monitor.stats(
                self._workers, self._outbox, peer=self._peer_name, address=self.address, is_down=is_down
            )

    # Work, called by the workers

    def has_work(self, worker: ConnectionWorker) -> bool:
        """Wait until there is something to send. Returns False when a PING is due.

        Raises:
            OSError: the connection is lost, or the link has been unused for long.
        """
        began = time.monotonic()
        with self._changed:
            while worker.is_alive and self._dialler.is_wanted():
                if self._outbox.has_work():
                    return True
                left = began + self._ping_seconds() - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        raise ConnectionAbortedError("the connection was lost, or is not wanted")

    def _ping_seconds(self) -> float:
        """Return the time after which an idle connection sends PING: soon while transfers depend on the peer."""
        if not self._outbox.num_transfers:
            return SILENCE_SECONDS / 3
        return min(HEARTBEAT_SECONDS, self._config.silence_seconds / 4)

    def take(self, worker: ConnectionWorker) -> bytes | ChunkTask | None:
        """Take a control frame or a chunk to send. The chunk's memory is in use until `sent`."""
        with self._changed:
            now = time.monotonic()
            if not worker.is_alive:
                return None
            control = self._outbox.next_frame(now=now)
            if control is not None:
                worker.last_control, frame = control
                return frame
            taken = self._outbox.take()
            if taken is None:
                return None
            chunk, request = taken
            worker.reading, worker.last_control = chunk.transfer_id, None
            self._monitor.bounds.on_written(chunk.slab.num_bytes, now=now)
            dscp = self._config.marks.of(request.priority)
            packing = self._monitor.packing
            is_trial = worker.can_pack and packing.wants_trial()
            return ChunkTask(chunk, request, packing.format, is_trial=is_trial, dscp=dscp)

    def sent(self, worker: ConnectionWorker, chunk: Chunk, costs: Sequence[PackingCost]) -> None:
        """Note that the worker has finished reading a chunk's memory, and what packing it cost."""
        with self._changed:
            worker.reading = None
            if self._outbox.sent(chunk):
                self._changed.notify_all()
            self._monitor.packing.learn(costs)
        self._events.deliver()

    def on_acknowledged(self, worker: ConnectionWorker, landed: list[Chunk], damaged: list[Chunk]) -> None:
        """Count chunks that arrived intact, and queue damaged ones again."""
        now = time.monotonic_ns()
        with self._changed:
            if worker.generation != self._workers.generation:
                return
            num_bytes = sum(chunk.slab.num_bytes for chunk in (*landed, *damaged))
            self._monitor.bounds.on_delivered(num_bytes, rtt_seconds=self._monitor.min_rtt_seconds, now=now * 1e-9)
            self._outbox.landed(landed, time_ns=now)
            if damaged:
                self._outbox.put_back(damaged)
                self._changed.notify_all()
        self._events.deliver()

    def on_have(self, worker: ConnectionWorker, header: Header, payload: bytearray) -> None:
        """Handle HAVE: the peer has accepted a transfer and reports what it holds.

        Decodes only a HAVE that is awaited, and one at a time, since it may grow to many times its length.
        """
        with self._decoding_have:
            with self._changed:
                sizes = self._outbox.sizes_awaiting_have(header.transfer_id)
            if sizes is None:
                return
            have = messages.decode_have(header, payload, num_objects=len(sizes))
            peer_state = PeerState.of(have, sizes)
            with self._changed:
                if worker.generation == self._workers.generation:
                    self._outbox.have(header.transfer_id, peer_state, now=time.monotonic())
                    self._changed.notify_all()
        self._events.deliver()

    def on_done(self, transfer_id: bytes, stats: TransferStats) -> None:
        """Handle DONE: the peer has every byte. The last acknowledgements may come later."""
        with self._changed:
            self._outbox.done(transfer_id, stats, now=time.monotonic())
        self._events.deliver()

    def on_refused(self, transfer_id: bytes, ending: EndReason) -> None:
        """Handle ERROR or CANCEL: the peer rejects a transfer or gives it up."""
        with self._changed:
            self._outbox.refused(transfer_id, ending, now=time.monotonic())
        self._events.deliver()

    def on_reopen(self, transfer_id: bytes) -> None:
        """Handle REOPEN: a transfer is unknown to the peer, or has lost its connections there."""
        with self._changed:
            self._outbox.reopen(transfer_id)
            self._changed.notify_all()

    def wake(self) -> None:
        """Have every worker look for work again."""
        with self._changed:
            self._changed.notify_all()

    # Periodic checks

    def _watch_forever(self) -> None:
        check_repeatedly(
            self._watch,
            is_closed=self._dialler.is_closed,
            pause_seconds=lambda: TICK_SECONDS if self._outbox.num_transfers else IDLE_TICK_SECONDS,
            log_failure=lambda: _log.exception("link.watch_failed", peer=self._peer_name),
        )

    def _watch(self, now: float) -> None:
        self._cancel_late(now)
        self._repeat_unanswered(now)
        with self._changed:
            # A peer that takes nothing must not keep the memory of an ended transfer in use.
            self._workers.abort_readers(self._outbox.stuck(ended_before=now - STUCK_MEMORY_SECONDS))
        self._measure()
        self._end_stalled(now)

    def _cancel_late(self, now: float) -> None:
        patience = self._config.silence_seconds
        with self._changed:
            seconds = self._peer_liveness.seconds_unreachable(
                now=now,
                is_connected=bool(self._workers),
                awaits_peer=self._outbox.awaits_peer and not self._workers.is_any_slow(now),
            )
            silent_seconds = self._peer_liveness.seconds_silent(
                now=now, heard_at=self._workers.heard_at(now), has_transfers=self._outbox.num_transfers > 0
            )
            unreachable_before = now - patience if seconds >= patience else -math.inf
            if self._workers and silent_seconds >= patience:
                # Transfers that began later have a chance over new connections.
                unreachable_before = now - patience / 2
                self._end_silent(silent_seconds)
            late = self._outbox.late(now=now, unreachable_before=unreachable_before)
        for transfer_id, reason in late:
            message = f"{self._peer_name} at {self.address} did not take it in time {self._dialler.last_error}"
            self.cancel(transfer_id, reason, message.rstrip())

    def _end_silent(self, seconds: float) -> None:
        """End every connection to a silent peer: new ones notice sooner that it is back than TCP's retransmissions."""
        _log.warning("link.silent", peer=self._peer_name, seconds=round(seconds, 1), connections=len(self._workers))
        self._dialler.last_error = f"(no sign of life for {seconds:.1f} s)"
        self._workers.abort()

    def _repeat_unanswered(self, now: float) -> None:
        with self._changed:
            patience = max(ANSWER_SECONDS, ANSWER_ROUND_TRIPS * self._workers.rtt_seconds)
            leaving = self._workers.transfers_leaving(now)
            if self._outbox.repeat_unanswered(now=now, patience_seconds=patience, leaving=leaving):
                self._changed.notify_all()

    def _measure(self) -> None:
        with self._changed:
            # The lock may have taken a while, so the time is read again.
            throughput = self._monitor.measure(time.monotonic(), self._workers, self._outbox)
            if throughput is not None and not self._config.awaits_peer:
                self._dialler.count_anew(throughput, rtt_seconds=self._monitor.min_rtt_seconds)
                self._outbox.set_num_connections(self._dialler.num_wanted)
            # Connections are missing if no thread could be started for them.
            self._dial()
            self._take_budget_shares()

    def _end_stalled(self, now: float) -> None:
        """End stalled connections, so that their chunks leave over the others."""
        with self._changed:
            stalled, to_ping = self._workers.stalled(now)
            for worker in stalled:
                _log.warning("link.stalled", peer=self._peer_name, unacknowledged_bytes=worker.in_flight_bytes)
                self._num_stalls.inc()
                worker.abort()
        for worker in to_ping:
            worker.ping()

    # Rate

    def _take_budget_shares(self) -> None:
        """Send no faster than the lowest of this link's shares of its budgets, and than a drain of the path's queue."""
        usage = self._monitor.usage(is_busy=self._outbox.num_transfers > 0)
        now = time.monotonic()
        shares = [budget.share(self, usage, now=now) for budget in self._config.budgets]
        share = min([self._monitor.drain_limit, *shares])
        if not math.isclose(share, self._pace, rel_tol=PACE_STEP_RATIO):
            self._pace = share
            self._divide_pace()
        self._fit_chunks()

    def _divide_pace(self) -> None:
        """Have the kernel send an equal part of the rate over each connection."""
        for worker in self._workers:
            worker.connection.pace(self._pace / len(self._workers))

    def _fit_chunks(self) -> None:
        """Choose the chunk size by what a connection carries, as far as that is known."""
        achievable = self._monitor.health.achievable_bytes_per_second
        rate = min(achievable or math.inf, self._pace)
        self._outbox.set_rate(rate / max(1, len(self._workers)))

    # Connections

    def _connect_once(self, number: int) -> None:
        """Dial one connection and send over it until it is lost or the link is closed."""
        with open_connection(self.address, self._config) as connection:
            try:
                challenge = handshake.dial(connection, self._identity, peer_name=self._peer_name)
                self._run_worker(connection, challenge, number)
            except RemoteProtocolError as error:
                metrics.WIRE_REFUSALS.labels(reason=error.reason).inc()
                connection.try_write(messages.encode_refusal(error))
                raise

    def serve(self, connection: Connection, hello: Hello) -> None:
        """Send over a connection that the peer has dialled, until it is lost.

        Raises:
            RemoteProtocolError: the peer violates the protocol.
        """
        with self._changed:
            if self._dialler.is_closed.is_set() or not self._start():
                return
            number = len(self._workers)
        self._run_worker(connection, hello, number)

    def _run_worker(self, connection: Connection, greeting: Challenge | Hello, number: int) -> None:
        worker = self._add_worker(connection, greeting, number)
        if worker is None:
            return
        began_at = time.monotonic()
        try:
            worker.run()
        except OSError as error:
            self._dialler.on_connection_lost(error)
        except RemoteProtocolError as error:
            self._dialler.on_connection_lost(error)
            raise
        finally:
            self._remove_worker(worker, lifetime_seconds=time.monotonic() - began_at)

    def _add_worker(self, connection: Connection, greeting: Challenge | Hello, number: int) -> ConnectionWorker | None:
        """Return a worker for a new connection, or None if there are enough."""
        with self._changed:
            if self._workers.set_process(greeting.boot_id):
                # Another process answers: what the previous one acknowledged is lost.
                self._outbox.connection_lost(is_last=True)
            if self._config.awaits_peer:
                self._dialler.num_wanted = min(number + 1, MAX_DIALLED_CONNECTIONS)
            elif not self._workers:
                self._dialler.count_by(connection)
            self._outbox.set_num_connections(self._dialler.num_wanted)
            if number >= self._dialler.num_wanted:
                return None
            capabilities = tuple(set(greeting.capabilities) & set(self._identity.capabilities))
            connection.choose_low_water()
            generation = self._workers.generation
            worker = ConnectionWorker(self, connection, generation=generation, capabilities=capabilities)
            self._workers.add(worker)
            self._dialler.last_error = ""
            self._divide_pace()
            self._fit_chunks()
            if self._dialler.is_closed.is_set():
                worker.abort()
            return worker

    def _remove_worker(self, worker: ConnectionWorker, *, lifetime_seconds: float) -> None:
        """Remove the worker of a lost connection. The other connections send its unacknowledged chunks again."""
        with self._changed:
            now = time.monotonic()
            self._workers.discard(worker)
            self._monitor.bounds.restart(self._workers.in_flight_bytes, now=now)
            self._divide_pace()
            self._fit_chunks()
            self._peer_liveness.connection_lost(now=now, lifetime_seconds=lifetime_seconds)
            if not self._workers:
                self._dialler.last_error = NOT_DIALLED if self._config.awaits_peer else self._dialler.last_error
            self._outbox.connection_lost(is_last=not self._workers)
            if worker.generation == self._workers.generation:
                self._outbox.put_back(worker.unacknowledged())
            self._changed.notify_all()
