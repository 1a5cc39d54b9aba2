"""Link probes: random bytes, sent for up to three seconds, that measure an idle link before a transfer needs it.

    commanded ──grant valid, node idle──▶ sending ──rate steady, all sent, time up, failure──▶ ended, reported
    commanded ──no grant, transfers in progress, too soon──▶ ended, reported

A manager commands probes and signs who sends how much to whom. Both ends also bound the bytes of a probe and the time until
the next. The receiver checks the bytes and discards them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prfaas import logs, metrics
from prfaas.agent.links import wire_priority
from prfaas.agent.outcomes import CommandOutcomes
from prfaas.agent.transfer.grant_check import GrantCheck, TransferRefused, refusal_reason
from prfaas.agent.transfer.open_body import decode_link_probe, encode_link_probe
from prfaas.errors import GrantError
from prfaas.grants import Grant
from prfaas.transport.receiver.api import Acceptance, OpenRequest
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
# Three steps below an ordinary request. Each step has a sixteenth of the share of the step above.
PRIORITY = 3
# From the peer's answer on. At 80 ms, BBR needs two seconds for its start and its first drain.
SENDING_SECONDS = 3.0
# Connecting included.
DEADLINE_SECONDS = 30.0
# Between two probes of a link.
PAUSE_SECONDS = 30.0
_log = logs.get("agent.link_probe")


@dataclass(eq=False)
class _OutboundProbe:
    """The probe that is being sent. It is dropped once the transport no longer reads its memory."""

    transfer_id: TransferId
    peer: AgentName
    link: Link
    # Monotonic seconds.
    accepted_at: float | None = None
    moved_bytes: int = 0
    has_ended: bool = False


class OutboundProbes:
    """Probes that this node sends, one at a time. Runs on the agent's loop."""

    def __init__(
        self,
        *,
        grant_check: GrantCheck,
        max_bytes: int,
        link_to: Callable[[str, AgentName], Link],
        link_stats: Callable[[], Iterable[LinkStats]],
        report: Callable[[CopyEnd], None],
    ) -> None:
        """`max_bytes` bounds each probe; 0 sends none. `report` gets the outcome of each command, also of a repeated one."""
        self._grant_check = grant_check
        self._max_bytes = max_bytes
        self._link_to = link_to
        self._link_stats = link_stats
        self._outcomes = CommandOutcomes(report)
        self._probe: _OutboundProbe | None = None
        self._started_at: dict[AgentName, float] = {}

    def take(self, command: ProbeCommand) -> None:
        """Carry out a command; a repeated command is ignored while in progress and reported again afterwards."""
        if self._outcomes.repeat(command.transfer_id):
            return
        if self._probe is None or self._probe.transfer_id != command.transfer_id:
            try:
                grant = self._grant_check.as_source(command.grant, "probe", command.transfer_id)
                self._start(command, grant, self._idle_link(grant))
            except (GrantError, TransferRefused) as error:
                self._end(CopyEnd(command.transfer_id, refusal_reason(error), str(error)))

    def _idle_link(self, grant: Grant) -> Link:
        """Return the link to probe.

        Raises:
            Refusal: The node is sending, or the link's rate is known or was probed recently.
        """
        if self._probe is not None or any(stats.num_transfers for stats in self._link_stats()):
            raise TransferRefused("cancelled", "this node is sending")
        if time.monotonic() - self._started_at.get(grant.destination, float("-inf")) < PAUSE_SECONDS:
            raise TransferRefused("cancelled", f"the link was probed within {PAUSE_SECONDS:.0f} s")
        link = self._link_to(grant.destination_address, grant.destination)
        if link.snapshot().achievable_bytes_per_second:
            raise TransferRefused("cancelled", "the link's rate is known")
        return link

    def _start(self, command: ProbeCommand, grant: Grant, link: Link) -> None:
        num_objects = min(grant.max_bytes, self._max_bytes) // OBJECT_BYTES
        if not num_objects:
            raise TransferRefused("cancelled", f"this node sends probes of {self._max_bytes} bytes at most")
        self._probe = _OutboundProbe(command.transfer_id, grant.destination, link)
        self._started_at[grant.destination] = time.monotonic()
        # Packing cannot shorten random bytes.
        memory = memoryview(os.urandom(OBJECT_BYTES))
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
        """End a probe whose rate is found, whose time is up, or that transfers wait for; `now` is monotonic seconds."""
        probe = self._probe
        if probe is None or probe.has_ended:
            return
        if sum(stats.num_transfers for stats in self._link_stats()) > 1:
            self._finish(probe, "cancelled", "transfers have begun")
        elif probe.accepted_at is not None and (probe.link.has_found or now - probe.accepted_at >= SENDING_SECONDS):
            self._finish(probe)

    def on_event(self, event: SendEvent) -> None:
        """Take an event of a link; events of other transfers are ignored."""
        probe = self._probe
        if probe is None or event.transfer_id != probe.transfer_id:
            return
        if isinstance(event, SendAccepted):
            probe.accepted_at = time.monotonic()
        elif isinstance(event, SendProgress):
            probe.moved_bytes = event.acked_bytes
        elif isinstance(event, SendMemoryFree):
            self._probe = None
        elif not probe.has_ended and isinstance(event, SendCompleted):
            self._finish(probe)
        elif not probe.has_ended and isinstance(event, SendFailed):
            self._finish(probe, event.reason, event.message)

    def _finish(self, probe: _OutboundProbe, outcome: CopyOutcome = "completed", message: str = "") -> None:
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
        )
        self._end(CopyEnd(probe.transfer_id, outcome, message, moved_bytes=probe.moved_bytes))

    def _end(self, end: CopyEnd) -> None:
        metrics.LINK_PROBES.labels(direction="out", outcome=end.outcome).inc()
        self._outcomes.add(end)


@dataclass
class _InboundProbe:
    """A peer's last probe. It lasts at most `DEADLINE_SECONDS`, which is no longer than it is remembered."""

    transfer_id: bytes
    started_at: float
    has_ended: bool = False


class InboundProbes:
    """Probes that arrive: one at a time, and from each peer one in `PAUSE_SECONDS`."""

    def __init__(self, *, grant_check: GrantCheck, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_bytes` bounds each probe; 0 accepts none."""
        self._grant_check = grant_check
        self._max_bytes = max_bytes
        self._clock = clock
        self._by_peer: dict[str, _InboundProbe] = {}

    def __contains__(self, transfer_id: TransferId) -> bool:
        return any(probe.transfer_id == transfer_id for probe in self._by_peer.values())

    def ended(self, transfer_id: TransferId) -> None:
        """Record that no more bytes of a probe arrive."""
        for probe in self._by_peer.values():
            probe.has_ended |= probe.transfer_id == transfer_id

    def accept(self, request: OpenRequest) -> Acceptance:
        """Accept a probe; the receiver discards its bytes.

        Raises:
            RemoteProtocolError: The body has another form.
            GrantError: The grant is invalid, the probe is too large, long or soon, or another probe is arriving.
        """
        token = decode_link_probe(request.open_body)
        peer = request.peer_name
        grant = self._grant_check.as_destination(token, "probe", TransferId(request.transfer_id), peer=peer)
        limit, num_bytes = min(grant.max_bytes, self._max_bytes), request.object_bytes.total_bytes
        if num_bytes > limit:
            raise GrantError("too_large", f"a probe of {num_bytes} bytes; the limit is {limit}")
        if request.deadline_seconds > DEADLINE_SECONDS:
            raise GrantError("too_long", f"a probe of {request.deadline_seconds:.0f} s; at most {DEADLINE_SECONDS:.0f}")
        now = self._clock()
        self._by_peer = {name: probe for name, probe in self._by_peer.items() if now - probe.started_at < PAUSE_SECONDS}
        if peer in self._by_peer:
            raise GrantError("too_soon", f"{peer} has sent a probe within {PAUSE_SECONDS:.0f} s")
        active = next((name for name, probe in self._by_peer.items() if not probe.has_ended), None)
        if active is not None:
            raise GrantError("probed", f"{active} is sending a probe, and a second would disturb it")
        self._by_peer[peer] = _InboundProbe(request.transfer_id, now)
        metrics.LINK_PROBES.labels(direction="in", outcome="taken").inc()
        return Acceptance(held=(), destination=None)
