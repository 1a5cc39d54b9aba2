"""Links to peers, their rate limits, and the priority of transfers on them."""

import fnmatch
from collections.abc import Callable, Iterable

from prfaas.agent.config import AgentConfig, PeerRateConfig
from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.net.tls import Certificates
from prfaas.transport.receiver.server import SendOver
from prfaas.transport.sender.api import SendEvent
from prfaas.transport.sender.chunker import MAX_PRIORITY
from prfaas.transport.sender.link import Link, LinkConfig
from prfaas.transport.sender.stats import LinkStats
from prfaas.types import AgentName

# Wire priority of a request without a priority: three steps are more urgent, four are less.
ORDINARY = 3
# Address of a peer that dials this agent.
REVERSE = "its own connections"


def wire_priority(priority: int) -> int:
    """Return the wire priority of a vLLM request priority: lower is more urgent, 0 is ordinary."""
    return min(max(ORDINARY + priority, 0), MAX_PRIORITY)


class RateLimits:
    """Rate budgets of peers, made from `egress` entries."""

    def __init__(self, entries: Iterable[PeerRateConfig]) -> None:
        self._entries = [(entry, RateBudget(entry.max_rate)) for entry in entries if entry.max_rate]

    def budgets_of(self, peer: str) -> tuple[RateBudget, ...]:
        """Return the budget of every entry that matches the peer: a shared one, or a new one for this peer."""
        return tuple(
            RateBudget(entry.max_rate) if entry.each else shared
            for entry, shared in self._entries
            if fnmatch.fnmatchcase(peer, entry.peers)
        )


class Links:
    """Links by address and peer. A peer that dials this agent has one link, whatever its address."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        key: bytes,
        certificates: Certificates | None,
        on_event: Callable[[SendEvent], None],
    ) -> None:
        """`on_event` is called from the links' threads."""
        self._config = config
        self._key = key
        self._certificates = certificates
        self._on_event = on_event
        self._limits = RateLimits(config.egress)
        self._links: dict[tuple[str, AgentName], Link] = {}

    def to(self, address: str, peer: AgentName) -> Link:
        """Return the link to a peer."""
        if peer in self._config.dialled_by:
            address = REVERSE
        link = self._links.get((address, peer))
        if link is None:
            link = self._links[address, peer] = Link(
                address,
                config=self._link_config(peer),
                local_name=self._config.name,
                peer_name=peer,
                key=self._key,
                on_event=self._on_event,
            )
        return link

    def _link_config(self, peer: AgentName) -> LinkConfig:
        config = self._config
        return LinkConfig(
            silence_seconds=config.silence_seconds,
            certificates=self._certificates,
            insecure_plaintext=config.insecure_plaintext,
            budgets=self._limits.budgets_of(peer),
            marks=config.dscp,
            weight_of_tenant=config.tenant_weight,
            packs=config.compression == "auto",
            awaits_peer=peer in config.dialled_by,
        )

    def reverse(self) -> dict[str, SendOver]:
        """Return for each peer that dials this agent the function that sends over its connections."""
        return {name: self.to(REVERSE, AgentName(name)).serve for name in self._config.dialled_by}

    def stats(self) -> list[LinkStats]:
        """Return the figures of each link; callable from any thread."""
        return [link.snapshot() for link in list(self._links.values())]

    def take_idle(self, now: float) -> list[Link]:
        """Remove and return links that were idle for long, for the caller to close; peers may have left or moved."""
        idle = {name: link for name, link in self._links.items() if link.is_idle(now)}
        for name in idle:
            del self._links[name]
        return list(idle.values())

    def close(self) -> None:
        """Close every link, which ends its transfers."""
        for link in self._links.values():
            link.close()
