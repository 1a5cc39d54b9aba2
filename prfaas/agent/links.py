"""How urgent a transfer is on the wire, by the priority of the request that it is for."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from prfaas.agent.config import AgentConfig, EgressConfig, IngressConfig
from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.net.tls import Certificates
from prfaas.transport.receiver.server import SendOver
from prfaas.transport.sender.api import SendEvent
from prfaas.transport.sender.chunker import MAX_PRIORITY
from prfaas.transport.sender.link import Link, LinkConfig
from prfaas.transport.sender.stats import LinkStats
from prfaas.types import AgentName

ORDINARY = 3  # of a request that names none: there are three steps above it and four below


def wire_priority(priority: int) -> int:
    """As in vLLM a lower one is more urgent and 0 the ordinary one; beyond three steps up and four down all are alike."""
    return min(max(ORDINARY + priority, 0), MAX_PRIORITY)


AWAITED = "its own connections"  # the address of a peer that dials this agent


class RateLimits:
    """The budgets that hold for each peer: those that its link sends from, or those that it sends to this node within."""

    def __init__(self, entries: Iterable[EgressConfig | IngressConfig]) -> None:
        self._entries = [(entry, RateBudget(entry.max_rate)) for entry in entries]

    def of(self, peer: str) -> tuple[RateBudget, ...]:
        """Those of one that is made for this peer: shared with others, or its own."""
        return tuple(
            RateBudget(its.max_rate) if its.each else together
            for its, together in self._entries
            if fnmatch.fnmatchcase(peer, its.peers)
        )


class Links:
    """Links by address and peer; of a peer that dials this agent there is one, whatever its address."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        key: bytes,
        certificates: Certificates | None,
        on_event: Callable[[SendEvent], None],
    ) -> None:
        """Events come from the links' threads."""
        self._config = config
        self._key = key
        self._certificates = certificates
        self._on_event = on_event
        self._limits = RateLimits(config.egress)
        self._links: dict[tuple[str, AgentName], Link] = {}

    def to(self, address: str, peer: AgentName) -> Link:
        """The link to this peer."""
        if peer in self._config.dialled_by:
            address = AWAITED
        link = self._links.get((address, peer))
        if link is None:
            link = self._links[address, peer] = Link(
                address,
                config=self._config_of(peer),
                local_name=self._config.name,
                peer_name=peer,
                key=self._key,
                on_event=self._on_event,
            )
        return link

    def _config_of(self, peer: AgentName) -> LinkConfig:
        config = self._config
        return LinkConfig(
            num_connections=config.num_connections,
            max_bytes_per_second=config.max_link_rate,
            congestion_control=config.congestion_control,
            reconnect_seconds=config.reconnect_seconds,
            certificates=self._certificates,
            insecure_plaintext=config.insecure_plaintext,
            budgets=self._limits.of(peer),
            packs=config.compression == "auto",
            lossy_fp8=config.lossy_fp8,
            awaits_peer=peer in config.dialled_by,
        )

    def awaited(self) -> dict[str, SendOver]:
        """What sends over the connections of each peer that dials this agent."""
        return {name: self.to(AWAITED, AgentName(name)).serve for name in self._config.dialled_by}

    def states(self) -> list[LinkStats]:
        """Each link's figures."""
        return [link.snapshot() for link in list(self._links.values())]

    def page(self) -> list[dict[str, Any]]:
        """Each link's figures, with those of each of its connections."""
        return [
            link.snapshot().to_dict() | {"connections": [asdict(connection) for connection in link.connections()]}
            for link in list(self._links.values())
        ]

    def take_idle(self, now: float) -> list[Link]:
        """Links that nobody has used for long, for the caller to close: peers may have left, or have other addresses."""
        idle = {name: link for name, link in self._links.items() if link.is_idle(now)}
        for name in idle:
            del self._links[name]
        return list(idle.values())

    def close(self) -> None:
        """End every transfer of every link."""
        for link in self._links.values():
            link.close()
