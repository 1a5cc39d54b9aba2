"""Membership: the registered nodes with their engines and figures, and which of them are alive."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

from prfaas.errors import IndexRefusal
from prfaas.kv.layout import Layout
from prfaas.state_machine import TransitionTable
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole


@dataclass(frozen=True)
class Engine:
    """One instance on an agent's machine."""

    instance: InstanceId
    url: str
    role: InstanceRole
    model: str  # The served model name, at which the block hashes are rooted.


@dataclass(frozen=True)
class Node:
    """An agent's description of its machine, sent when it registers."""

    name: AgentName
    cluster: ClusterName
    cluster_kind: ClusterKind
    wire_address: str
    epoch: int
    layouts: tuple[Layout, ...] = ()
    engines: tuple[Engine, ...] = ()


@dataclass(frozen=True)
class LinkFigures:
    """One node's link to a peer. Rates are since the last report."""

    peer: AgentName
    bytes_per_second: float
    capacity_bytes_per_second: float  # The most that the link is known to carry; 0 when unknown.
    rtt_seconds: float
    min_rtt_seconds: float
    queued_bytes: int
    retransmit_ratio: float
    num_connections: int
    is_down: bool = False  # Dialled without an answer. A link that has not been dialled yet is not down.
    congestion: str = ""  # Cause as the agent sees it: queue, loss or rtt; empty without congestion.


@dataclass(frozen=True)
class EngineLoad:
    """Load of an instance."""

    instance: InstanceId
    num_running: int
    num_waiting: int
    kv_usage_ratio: float
    is_silent: bool = False  # The engine does not answer its agent.


@dataclass(frozen=True)
class Figures:
    """A node's latest figures."""

    links: tuple[LinkFigures, ...] = ()
    engines: tuple[EngineLoad, ...] = ()


class NodeState(Enum):
    """State of a node as one manager sees it."""

    UNKNOWN = auto()
    LIVE = auto()
    SILENT = auto()  # Heartbeats are missing: the node gets no new requests.
    EXPIRED = auto()  # No report within the expiry: the node is in no answer.


class NodeEvent(Enum):
    """Event that may change a node's state."""

    REGISTER = auto()
    REPORT = auto()
    MISS = auto()
    EXPIRE = auto()
    FORGET = auto()


TRANSITIONS = TransitionTable(
    "node membership",
    NodeState.UNKNOWN,
    {
        (NodeState.UNKNOWN, NodeEvent.REGISTER): NodeState.LIVE,
        (NodeState.LIVE, NodeEvent.REGISTER): NodeState.LIVE,
        (NodeState.LIVE, NodeEvent.REPORT): NodeState.LIVE,
        (NodeState.LIVE, NodeEvent.MISS): NodeState.SILENT,
        (NodeState.LIVE, NodeEvent.EXPIRE): NodeState.EXPIRED,
        (NodeState.LIVE, NodeEvent.FORGET): NodeState.UNKNOWN,
        (NodeState.SILENT, NodeEvent.REGISTER): NodeState.LIVE,
        (NodeState.SILENT, NodeEvent.REPORT): NodeState.LIVE,
        (NodeState.SILENT, NodeEvent.MISS): NodeState.SILENT,
        (NodeState.SILENT, NodeEvent.EXPIRE): NodeState.EXPIRED,
        (NodeState.SILENT, NodeEvent.FORGET): NodeState.UNKNOWN,
        (NodeState.EXPIRED, NodeEvent.REGISTER): NodeState.LIVE,
        (NodeState.EXPIRED, NodeEvent.REPORT): NodeState.LIVE,
        (NodeState.EXPIRED, NodeEvent.MISS): NodeState.SILENT,
        (NodeState.EXPIRED, NodeEvent.FORGET): NodeState.UNKNOWN,
    },
)


@dataclass(frozen=True)
class Member:
    """A node, the time of its latest report, and its state at the latest check."""

    node: Node
    last_report_at: float
    figures: Figures = Figures()
    state: NodeState = NodeState.LIVE
    sends_heartbeats: bool = False  # To this manager, so that silence means something.


class Membership:
    """All registered nodes. Times are seconds on any clock that only goes forward."""

    def __init__(self, expiry_seconds: float, silence_seconds: float) -> None:
        self.expiry_seconds = expiry_seconds
        self.silence_seconds = silence_seconds
        self.version = 0  # Grows with every change of a node but the time of its latest report.
        self._members: dict[AgentName, Member] = {}

    def __contains__(self, name: AgentName) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def get(self, name: AgentName) -> Member | None:
        return self._members.get(name)

    def state(self, name: AgentName) -> NodeState:
        member = self._members.get(name)
        return TRANSITIONS.initial if member is None else member.state

    def register(self, node: Node, now: float) -> bool:
        """Add or replace a node, and return whether that changes anything but the time.

        Raises:
            IndexRefusal: the epoch is older than the known epoch, or an instance belongs to another live node.
        """
        known = self._members.get(node.name)
        if known and node.epoch < known.node.epoch:
            raise IndexRefusal("stale_epoch", f"{node.name} registers epoch {node.epoch}; {known.node.epoch} is known")
        self._check_instances(node, now)
        figures = Figures()
        if known and known.node.epoch == node.epoch:
            figures, now = known.figures, max(now, known.last_report_at)
        state = TRANSITIONS.next(self.state(node.name), NodeEvent.REGISTER)
        self._members[node.name] = Member(node, now, figures, state)
        self.version += 1
        return known is None or known.node != node

    def _check_instances(self, node: Node, now: float) -> None:
        own = {engine.instance for engine in node.engines}
        for member in self.live(now) if own else ():
            shared = own & {engine.instance for engine in member.node.engines}
            if member.node.name != node.name and shared:
                raise IndexRefusal("malformed", f"{', '.join(shared)} is already registered by {member.node.name}")

    def record_report(
        self,
        name: AgentName,
        *,
        epoch: int,
        now: float,
        figures: Figures | None = None,
        is_heartbeat: bool = False,
        is_silent: bool = False,
    ) -> None:
        """Record a sign of life, or with `is_silent` another manager's word that heartbeats are missing.

        Raises:
            IndexRefusal: the node is unknown or has another epoch, and so must register.
        """
        member = self._members.get(name)
        if member is None:
            raise IndexRefusal("unknown_node", f"{name} has not registered")
        if member.node.epoch != epoch:
            raise IndexRefusal("stale_epoch", f"{name} reports epoch {epoch}; {member.node.epoch} is registered")
        state = TRANSITIONS.next(member.state, NodeEvent.MISS if is_silent else NodeEvent.REPORT)
        self._members[name] = Member(
            member.node,
            max(now, member.last_report_at),
            figures or member.figures,
            state,
            sends_heartbeats=is_heartbeat or (member.sends_heartbeats and not is_silent),
        )
        self.version += figures is not None or state is not member.state

    def live(self, now: float) -> list[Member]:
        """Return the members that reported within the expiry, by name. Those whose heartbeats are missing are SILENT."""
        found = []
        for name, member in sorted(self._members.items()):
            age = now - member.last_report_at
            if age >= self.expiry_seconds:
                if member.state is not NodeState.EXPIRED:
                    self._advance(name, NodeEvent.EXPIRE)
                continue
            if member.sends_heartbeats and member.state is NodeState.LIVE and age >= self.silence_seconds:
                self._advance(name, NodeEvent.MISS)
            found.append(self._members[name])
        return found

    def _advance(self, name: AgentName, event: NodeEvent) -> None:
        member = self._members[name]
        self._members[name] = replace(member, state=TRANSITIONS.next(member.state, event))
        self.version += 1

    def silent_for(self, seconds: float, now: float) -> list[AgentName]:
        """Return the nodes without a report for so long."""
        return [name for name, member in self._members.items() if now - member.last_report_at >= seconds]

    def forget(self, name: AgentName) -> None:
        """Remove a node; nothing happens if it is unknown."""
        member = self._members.pop(name, None)
        if member is not None:
            TRANSITIONS.next(member.state, NodeEvent.FORGET)
        self.version += 1


def check_consistent(node: Node, known: Node) -> None:
    """Raise IndexRefusal if two nodes cannot be in one cluster."""
    if node.cluster_kind != known.cluster_kind:
        raise IndexRefusal(
            "mixed_kinds",
            f"{node.name} says that its cluster is {node.cluster_kind} and {known.name} that it is {known.cluster_kind}: "
            f"they cannot both be in cluster {node.cluster}; give one of them another cluster or cluster_kind",
        )
