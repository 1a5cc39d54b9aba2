"""Probes of links: bytes of no meaning, for a second or three, that show what an idle link carries before a transfer does.

    taken ──grant, an idle node──▶ sending ──the rate is steady, all is sent, time is up, failure──▶ ended, reported
    taken ──no grant, transfers under way, too soon──▶ ended, reported

A manager orders them and signs who sends how much to whom. Neither end trusts it with more: what one probe brings, and how soon
the next may come, is bounded here too. Who receives one checks its bytes and throws them away.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prfaas import grants, logs, metrics
from prfaas.agent.links import wire_priority
from prfaas.agent.transfer.grant_check import Refusal
from prfaas.agent.transfer.plan import decode_link_probe, encode_link_probe
from prfaas.errors import GrantError
from prfaas.grants import Grant
from prfaas.transport.receiver.api import Accepted, OpenRequest
from prfaas.transport.sender.api import (
    SendAccepted,
    SendCompleted,
    SendEvent,
    SendFailed,
    SendMemoryFree,
    SendProgress,
    SendRequest,
)
from prfaas.transport.sender.link import Link
from prfaas.transport.sender.stats import LinkStats
from prfaas.types import AgentName, CopyEnd, CopyOutcome, ProbeCommand, TransferId

OBJECT_BYTES = 1 << 20
PRIORITY = 3  # each step is a sixteenth of an ordinary request's share of the link
SENDING_SECONDS = 3.0  # from the peer's answer on: over 80 ms BBR needs two for its start and its first drain
DEADLINE_SECONDS = 30.0  # connecting included
PAUSE_SECONDS = 30.0  # from one probe of a link to the next
MAX_REMEMBERED = 64  # ended probes: a command that comes again is answered and not carried out again
_log = logs.get("agent.link_probes")


@dataclass(eq=False)
class _Probe:
    """The probe under way. It goes once nobody reads its memory."""

    transfer_id: TransferId
    peer: AgentName
    link: Link
    accepted_at: float | None = None  # monotonic seconds
    moved_bytes: int = 0
    has_ended: bool = False


class OutboundProbes:
    """The probes that leave this node, one at a time. Runs on the agent's loop; link events are handed over to it."""

    def __init__(
        self,
        *,
        name: AgentName,
        grant_key: bytes,
        max_bytes: int,
        link_to: Callable[[str, AgentName], Link],
        states: Callable[[], Iterable[LinkStats]],
        report: Callable[[CopyEnd], None],
    ) -> None:
        """`max_bytes` bounds each, 0: none is sent. `report` hears how each command ended, once for each time that it came."""
        self._name = name
        self._grant_key = grant_key
        self._max_bytes = max_bytes
        self._link_to = link_to
        self._states = states
        self._report = report
        self._under_way: _Probe | None = None
        self._began_at: dict[AgentName, float] = {}
        self._ended: OrderedDict[TransferId, CopyEnd] = OrderedDict()

    def take(self, command: ProbeCommand) -> None:
        """Carry out a command, unless it is under way; one that has ended is reported again."""
        ended = self._ended.get(command.transfer_id)
        if ended is not None:
            self._report(ended)
        elif self._under_way is None or self._under_way.transfer_id != command.transfer_id:
            self._start(command)

    def _start(self, command: ProbeCommand) -> None:
        try:
            grant = self._check(command)
            self._begin(command, grant, self._idle_link(grant))
        except GrantError as error:
            metrics.GRANTS_REFUSED.labels(reason=error.reason).inc()
            self._end(CopyEnd(command.transfer_id, "grant_refused", str(error)))
        except Refusal as refusal:
            self._end(CopyEnd(command.transfer_id, refusal.reason, str(refusal)))

    def _check(self, command: ProbeCommand) -> Grant:
        return grants.verify_end(
            command.grant,
            self._grant_key,
            kind="probe",
            end="source",
            agent=self._name,
            transfer_id=command.transfer_id,
            now=time.time(),
        )

    def _idle_link(self, grant: Grant) -> Link:
        """Raises Refusal: it is not idle, it is known, or it was probed a moment ago."""
        if self._under_way is not None or any(state.num_transfers for state in self._states()):
            raise Refusal("cancelled", "this node is sending")
        if time.monotonic() - self._began_at.get(grant.destination, float("-inf")) < PAUSE_SECONDS:
            raise Refusal("cancelled", f"the link was probed within {PAUSE_SECONDS:.0f} s")
        link = self._link_to(grant.destination_address, grant.destination)
        if link.snapshot().achievable_bytes_per_second:
            raise Refusal("cancelled", "what the link carries is known")
        return link

    def _begin(self, command: ProbeCommand, grant: Grant, link: Link) -> None:
        num_objects = min(grant.max_bytes, self._max_bytes) // OBJECT_BYTES
        if not num_objects:
            raise Refusal("cancelled", f"this node sends probes of {self._max_bytes} bytes at most")
        self._under_way = _Probe(command.transfer_id, grant.destination, link)
        self._began_at[grant.destination] = time.monotonic()
        memory = memoryview(os.urandom(OBJECT_BYTES))  # which no packing makes shorter
        link.begin_probe()
        link.open(
            SendRequest(
                transfer_id=command.transfer_id,
                open_body=encode_link_probe(command.grant),
                object_bytes=[OBJECT_BYTES] * num_objects,
                source=lambda index: memory[:],
                priority=wire_priority(PRIORITY),
                deadline_seconds=DEADLINE_SECONDS,
            )
        )
        link.ready(
            command.transfer_id, first_object=0, num_objects=num_objects, offset_bytes=0, length_bytes=OBJECT_BYTES
        )

    def expire(self, now: float) -> None:
        """End a probe that has found something, has had its time, or is in the way; `now` is monotonic seconds."""
        probe = self._under_way
        if probe is None or probe.has_ended:
            return
        if sum(state.num_transfers for state in self._states()) > 1:
            self._finish(probe, "cancelled", "transfers have begun")
        elif probe.accepted_at is not None and (probe.link.has_found or now - probe.accepted_at >= SENDING_SECONDS):
            self._finish(probe)

    def on_event(self, event: SendEvent) -> None:
        """What a link says; of transfers that are no probes nothing happens."""
        probe = self._under_way
        if probe is None or event.transfer_id != probe.transfer_id:
            return
        if isinstance(event, SendAccepted):
            probe.accepted_at = time.monotonic()
        elif isinstance(event, SendProgress):
            probe.moved_bytes = event.acked_bytes
        elif isinstance(event, SendMemoryFree):
            self._under_way = None
        elif not probe.has_ended and isinstance(event, SendCompleted):
            self._finish(probe)
        elif not probe.has_ended and isinstance(event, SendFailed):
            self._finish(probe, event.reason, event.message)

    def _finish(self, probe: _Probe, outcome: CopyOutcome = "completed", message: str = "") -> None:
        probe.has_ended = True
        found = probe.link.end_probe()
        probe.link.cancel(probe.transfer_id, "cancelled", "the probe is over")
        _log.info(
            "link.probed",
            peer=probe.peer,
            outcome=outcome,
            message=message,
            moved_bytes=probe.moved_bytes,
            bytes_per_second=round(found.achievable_bytes_per_second),
            least_bytes_per_second=round(found.least_bytes_per_second),
        )
        self._end(CopyEnd(probe.transfer_id, outcome, message, moved_bytes=probe.moved_bytes))

    def _end(self, end: CopyEnd) -> None:
        metrics.LINK_PROBES.labels(direction="out", outcome=end.outcome).inc()
        self._ended[end.transfer_id] = end
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._report(end)


@dataclass
class _Taken:
    """A probe that arrives, or has. No longer than `DEADLINE_SECONDS`, so no longer than it is remembered."""

    transfer_id: bytes
    began_at: float  # on the clock
    has_ended: bool = False


class InboundProbes:
    """The probes that arrive, one at a time: for each a grant, and of each peer one in `PAUSE_SECONDS`."""

    def __init__(
        self, *, name: AgentName, grant_key: bytes, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_bytes` bounds each, 0: none is taken."""
        self._name = name
        self._grant_key = grant_key
        self._max_bytes = max_bytes
        self._clock = clock
        self._taken: dict[str, _Taken] = {}  # by peer, its last one

    def __contains__(self, transfer_id: TransferId) -> bool:
        return any(its.transfer_id == transfer_id for its in self._taken.values())

    def ended(self, transfer_id: TransferId) -> None:
        """Nothing of it arrives any more."""
        for its in self._taken.values():
            its.has_ended |= its.transfer_id == transfer_id

    def accept(self, request: OpenRequest) -> Accepted:
        """Take a probe, whose bytes go nowhere.

        Raises:
            RemoteProtocolError: it is none of this version.
            GrantError: it has no grant, more bytes or time than it may, comes too soon, or while another's arrives.
        """
        token = decode_link_probe(request.open_body)
        its, now = TransferId(request.transfer_id), time.time()
        grant = grants.verify_end(
            token, self._grant_key, kind="probe", end="destination", agent=self._name, transfer_id=its, now=now
        )
        if grant.source != request.peer_name:
            raise GrantError("not_theirs", f"the grant lets {grant.source} send, not {request.peer_name}")
        limit, num_bytes = min(grant.max_bytes, self._max_bytes), request.object_bytes.total_bytes
        if num_bytes > limit:
            raise GrantError("too_large", f"a probe of {num_bytes} bytes; at most {limit} are taken")
        if request.deadline_seconds > DEADLINE_SECONDS:
            raise GrantError("too_long", f"a probe of {request.deadline_seconds:.0f} s; at most {DEADLINE_SECONDS:.0f}")
        now = self._clock()
        self._taken = {peer: its for peer, its in self._taken.items() if now - its.began_at < PAUSE_SECONDS}
        if request.peer_name in self._taken:
            raise GrantError("too_soon", f"{request.peer_name} has sent a probe within {PAUSE_SECONDS:.0f} s")
        busy = next((peer for peer, its in self._taken.items() if not its.has_ended), None)
        if busy is not None:
            raise GrantError("probed", f"{busy} is sending a probe, which two at a time would spoil")
        self._taken[request.peer_name] = _Taken(request.transfer_id, now)
        metrics.LINK_PROBES.labels(direction="in", outcome="taken").inc()
        return Accepted(held=(), destination=None)
