"""Sending end of a link to a real agent, controlled by a test."""

import time
from collections.abc import Sequence
from typing import Any

from prfaas import grants
from prfaas.hashing import NO_HASH
from prfaas.transport.sender.api import SendCompleted, SendEvent, SendFailed, SendRequest
from prfaas.transport.sender.link import Link, LinkConfig
from prfaas.types import AgentName, TransferId
from tests.support.agents import Agents, RunningAgent
from tests.support.waiting import PATIENCE_SECONDS, wait_until

MIB = 1 << 20
DEADLINE_SECONDS = 30.0


class Peer:
    """Another agent's end of the wire."""

    def __init__(self, agents: Agents, west: RunningAgent, *, name: str = "east", **link: Any) -> None:
        self._agents, self._west, self._name = agents, west, name
        self.events: list[SendEvent] = []
        self.link = Link(
            west.wire,
            config=LinkConfig(**{"num_connections": 2, "silence_seconds": PATIENCE_SECONDS} | link),
            local_name=name,
            peer_name="west",
            key=grants.derive_key(agents.secret, "wire"),
            on_event=self.events.append,
        )

    def grant(self, transfer_id: TransferId, **changes: Any) -> bytes:
        fields: dict[str, Any] = {
            "transfer_id": transfer_id,
            "source": AgentName(self._name),
            "destination": AgentName("west"),
            "destination_address": self._west.wire,
            "prompt_hash": NO_HASH,
            "num_tokens": 0,
            "max_bytes": 4 * MIB,
            "tenant": "",
            "expires_at": time.time() + 600.0,
        }
        return grants.sign(grants.Grant(**fields | changes), grants.derive_key(self._agents.secret, "grant"))

    def offer(self, transfer_id: TransferId, body: bytes, sizes: Sequence[int] = (MIB,) * 4) -> None:
        """Send an OPEN, and no objects yet."""
        memory = memoryview(bytes(max(sizes)))
        self.link.open(
            SendRequest(transfer_id, body, list(sizes), lambda index: memory[: sizes[index]], 0, DEADLINE_SECONDS)
        )

    def end(self, transfer_id: TransferId, sizes: Sequence[int] = (MIB,) * 4) -> SendEvent:
        """Send all objects of an offered transfer and return its last event."""
        for index, size in enumerate(sizes):
            self.link.ready(transfer_id, first_object=index, num_objects=1, offset_bytes=0, length_bytes=size)
        wait_until(lambda: self.ends(transfer_id), what="its end")
        return self.ends(transfer_id)[0]

    def ends(self, transfer_id: TransferId) -> list[SendEvent]:
        ended = (event for event in self.events if isinstance(event, SendCompleted | SendFailed))
        return [event for event in ended if event.transfer_id == transfer_id]
