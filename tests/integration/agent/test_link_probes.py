"""Link probes between real agents: granted bytes are discarded, and others refused."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from prfaas import grants
from prfaas.agent.engine.protocol import Receive, Send
from prfaas.agent.transfer.grant_check import GrantCheck
from prfaas.agent.transfer.link_probe import OutboundProbes
from prfaas.agent.transfer.open_body import OpenBody
from prfaas.agent.transfer.plan import make_plan
from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.sender.api import SendCompleted, SendFailed
from prfaas.types import AgentName, CopyEnd, ProbeCommand, TransferId
from tests.support.agents import Agents, RunningAgent, blocks, chain_of, layout
from tests.support.link_peer import MIB, Peer
from tests.support.waiting import wait_until


class Sender:
    """Agent east as the sender of probes that a manager commands."""

    def __init__(
        self, agents: Agents, west: RunningAgent, *, max_bytes: int = 4 * MIB, num_transfers: int = 0, **link: Any
    ) -> None:
        """`num_transfers` are in progress beside the probe."""
        self.west = west
        self.peer = Peer(agents, west, **link)
        self.reports: list[CopyEnd] = []
        self.probes = OutboundProbes(
            grant_check=GrantCheck(AgentName("east"), grants.derive_key(agents.secret, "grant")),
            max_bytes=max_bytes,
            link_to=lambda address, name: self.peer.link,
            link_stats=lambda: [
                replace(stats := self.peer.link.snapshot(), num_transfers=stats.num_transfers + num_transfers)
            ],
            report=self.reports.append,
        )
        self._num_told = 0

    def command(self, **changes: Any) -> ProbeCommand:
        transfer_id = TransferId(os.urandom(16))
        return ProbeCommand(transfer_id, self.peer.grant(transfer_id, **changes))

    def outcome(self, command: ProbeCommand) -> CopyEnd:
        """Carry out a command and return its outcome."""
        num_before = len(self.reports)
        self.probes.take(command)
        wait_until(lambda: self.tick() and len(self.reports) > num_before, what="the report")
        wait_until(lambda: self.tick() and self.probes._probe is None, what="the end of the probe")
        assert len(self.reports) == num_before + 1 and self.reports[-1].transfer_id == command.transfer_id
        return self.reports[-1]

    def tick(self) -> bool:
        """Take events and expire probes, as the agent does at each tick."""
        events = self.peer.events[self._num_told :]
        self._num_told += len(events)
        for event in events:
            self.probes.on_event(event)
        self.probes.expire(time.monotonic())
        return True


@contextmanager
def _sender(agents: Agents, **settings: Any) -> Iterator[Sender]:
    made = Sender(agents, agents.start("west"), **settings)
    yield made
    made.peer.link.close()


@contextmanager
def _peer(agents: Agents, **settings: str) -> Iterator[tuple[Peer, RunningAgent]]:
    west = agents.start("west", **settings)
    peer = Peer(agents, west)
    yield peer, west
    peer.link.close()


def _refused(reason: str) -> float:
    return REGISTRY.get_sample_value("prfaas_agent_grants_refused_total", {"reason": reason}) or 0.0


def test_granted_probe_is_received_and_discarded(agents: Agents) -> None:
    with _peer(agents) as (peer, west):
        transfer_id = TransferId(os.urandom(16))
        end = peer.probe(transfer_id, peer.grant(transfer_id))
        assert isinstance(end, SendCompleted) and end.stats.wire_bytes >= 4 * MIB
        status = west.status_page()
        assert (status["receiving"], status["pool"]["transfer"], status["pool"]["prefix"]) == (0, 0, 0)
        again = TransferId(os.urandom(16))
        before = _refused("too_soon")
        end = peer.probe(again, peer.grant(again))
        assert isinstance(end, SendFailed) and end.reason == "grant_refused"
        assert _refused("too_soon") == before + 1


def test_probe_grant_does_not_allow_a_transfer(agents: Agents) -> None:
    """Nor does an engine get slots for it."""
    west = agents.start("west")
    engine, chain = agents.engine(west, "e"), chain_of()
    transfer_id, token = agents.grant("west", west, chain, kind="probe")
    for message in (Send(transfer_id, token, ()), Receive(transfer_id, token, chain.at(chain.num_tokens), ())):
        engine.scheduler.post(message)
        engine.fails("grant_refused")


def test_repeated_probe_command_is_answered_once_carried_out(agents: Agents) -> None:
    with _sender(agents) as sender:
        command = sender.command()
        end = sender.outcome(command)
        assert end.outcome == "completed" and end.moved_bytes <= 4 * MIB
        moved = sender.peer.link.snapshot().acknowledged_bytes
        assert sender.outcome(command) == end
        assert sender.peer.link.snapshot().acknowledged_bytes == moved
        too_soon = sender.outcome(sender.command())
        assert too_soon.outcome == "cancelled" and "was probed within" in too_soon.message


@pytest.mark.parametrize("changes", [{"source": AgentName("south")}, {"kind": "transfer"}, {"expires_at": 1.0}])
def test_probe_command_with_unsuitable_grant_sends_nothing(agents: Agents, changes: dict[str, Any]) -> None:
    with _sender(agents) as sender:
        assert sender.outcome(sender.command(**changes)).outcome == "grant_refused"
        forged = ProbeCommand(TransferId(os.urandom(16)), bytes(100))
        assert sender.outcome(forged).outcome == "grant_refused"
        assert sender.peer.link.snapshot().num_connections == 0


def test_no_probe_starts_during_a_transfer(agents: Agents) -> None:
    with _sender(agents, num_transfers=1) as sender:
        end = sender.outcome(sender.command())
        assert end.outcome == "cancelled" and "sending" in end.message
        assert sender.peer.link.snapshot().num_connections == 0


def test_probe_ends_when_a_transfer_begins(agents: Agents) -> None:
    """Here a link is so slow that the probe would take minutes."""
    with _sender(agents, max_bytes=64 * MIB, budgets=(RateBudget(4e6),)) as sender:
        agents.engine(sender.west, "e")
        chain, its_layout = chain_of(), layout()
        transfer_id, token = agents.grant("east", sender.west, chain)
        plan = make_plan((its_layout,), blocks(chain, chain.num_tokens), chain.num_tokens)
        sender.probes.take(sender.command(max_bytes=64 * MIB))
        link = sender.peer.link
        wait_until(lambda: link.snapshot().acknowledged_bytes > 0, what="the probe's first bytes")
        body = OpenBody(token, (its_layout.fingerprint,), (its_layout,), plan.groups).encode()
        sender.peer.offer(transfer_id, body, plan.object_bytes)
        sender.tick()
        (end,) = sender.reports
        assert (end.outcome, end.message) == ("cancelled", "transfers have begun")
        assert isinstance(sender.peer.end(transfer_id, plan.object_bytes), SendCompleted)
        wait_until(lambda: sender.tick() and sender.probes._probe is None, what="the end of the probe")
        assert link.snapshot().acknowledged_bytes < 32 * MIB


def test_agent_with_probes_turned_off_sends_none(agents: Agents) -> None:
    with _sender(agents, max_bytes=0) as sender:
        assert sender.outcome(sender.command()).outcome == "cancelled"
        assert sender.peer.link.snapshot().num_connections == 0
