"""Which nodes there are, what stands beside them, and which of them are alive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from prfaas.errors import IndexRefusal
from prfaas.kv.layout import Layout
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole


@dataclass(frozen=True)
class Engine:
    """One instance beside an agent."""

    instance: InstanceId
    url: str
    role: InstanceRole
    model: str  # the served model name, which the block hashes are rooted in


@dataclass(frozen=True)
class Node:
    """What an agent says of its machine when it registers."""

    name: AgentName
    cluster: ClusterName
    cluster_kind: ClusterKind
    wire_address: str
    epoch: int
    layouts: tuple[Layout, ...] = ()
    engines: tuple[Engine, ...] = ()
    hardware: str = ""  # what computes there, equal over a cluster; empty: not said
    takes_probes: bool = False  # of links


@dataclass(frozen=True)
class LinkFigures:
    """One node's path to a peer; rates are since its last report."""

    peer: AgentName
    bytes_per_second: float
    capacity_bytes_per_second: float  # what it is known to carry at most; 0 when unknown
    rtt_seconds: float
    min_rtt_seconds: float
    queued_bytes: int
    retransmit_ratio: float
    num_connections: int
    is_down: bool = False  # dialled, and nobody answers; a link that has not been dialled yet is not down
    queue_seconds: float = 0.0  # that what waits takes at its achievable rate
    congestion: str = ""  # why it is choked, as its agent sees it: queue, loss or rtt; "": it is not
    limit: str = ""  # what its connections mostly wait for: application, receiver_window, send_buffer or network
    is_probed: bool = False  # the capacity is what a probe found
    least_bytes_per_second: float = (
        0.0  # while the capacity is not known, what a probe has shown the link to carry at least
    )


@dataclass(frozen=True)
class EngineLoad:
    """How busy an instance is."""

    instance: InstanceId
    num_running: int
    num_waiting: int
    kv_usage_ratio: float


@dataclass(frozen=True)
class Figures:
    """A node's latest figures."""

    links: tuple[LinkFigures, ...] = ()
    engines: tuple[EngineLoad, ...] = ()


@dataclass(frozen=True)
class Member:
    """A node, and when it was last heard of on the caller's clock."""

    node: Node
    heard_at: float
    figures: Figures = Figures()


class Membership:
    """All registered nodes. Times are seconds on any clock that only goes forward."""

    def __init__(self, expiry_seconds: float) -> None:
        self.expiry_seconds = expiry_seconds
        self.version = 0  # grows with everything that is heard of any node
        self._members: dict[AgentName, Member] = {}

    def __contains__(self, name: AgentName) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def get(self, name: AgentName) -> Member | None:
        return self._members.get(name)

    def register(self, node: Node, now: float) -> bool:
        """Make a node known; True when that changes anything but the time.

        Raises:
            IndexRefusal: its epoch is older than the known one, or an instance of it stands beside another live node.
        """
        known = self._members.get(node.name)
        if known and node.epoch < known.node.epoch:
            raise IndexRefusal("stale_epoch", f"{node.name} registers epoch {node.epoch}; {known.node.epoch} is known")
        self._check_instances(node, now)
        figures = Figures()
        if known and known.node.epoch == node.epoch:
            figures, now = known.figures, max(now, known.heard_at)
        self._members[node.name] = Member(node, now, figures)
        self.version += 1
        return known is None or known.node != node

    def _check_instances(self, node: Node, now: float) -> None:
        ours = {engine.instance for engine in node.engines}
        for member in self._members.values():
            theirs = {engine.instance for engine in member.node.engines}
            if member.node.name != node.name and ours & theirs and self._is_live(member, now):
                raise IndexRefusal("malformed", f"{', '.join(ours & theirs)} stands beside {member.node.name} already")

    def hear(self, name: AgentName, *, epoch: int, now: float, figures: Figures | None = None) -> None:
        """Note a sign of life.

        Raises:
            IndexRefusal: the node is unknown, or has another epoch: it must register.
        """
        member = self._members.get(name)
        if member is None:
            raise IndexRefusal("unknown_node", f"{name} has not registered")
        if member.node.epoch != epoch:
            raise IndexRefusal("stale_epoch", f"{name} speaks of epoch {epoch}; {member.node.epoch} is registered")
        heard_at = max(now, member.heard_at)
        self._members[name] = replace(member, heard_at=heard_at, figures=figures or member.figures)
        self.version += 1

    def live(self, now: float) -> list[Member]:
        """The members heard of within the expiry, by name."""
        return [member for _, member in sorted(self._members.items()) if self._is_live(member, now)]

    def _is_live(self, member: Member, now: float) -> bool:
        return now - member.heard_at < self.expiry_seconds

    def silent_for(self, seconds: float, now: float) -> list[AgentName]:
        """Names of the nodes that have not been heard of for so long."""
        return [name for name, member in self._members.items() if now - member.heard_at >= seconds]

    def forget(self, name: AgentName) -> None:
        self._members.pop(name, None)
        self.version += 1


def check_beside(node: Node, other: Node) -> None:
    """Raises IndexRefusal where two nodes cannot be in one cluster."""
    cannot = f"they cannot both be in cluster {node.cluster}"
    if node.cluster_kind != other.cluster_kind:
        raise IndexRefusal(
            "mixed_kinds",
            f"{node.name} says that its cluster is {node.cluster_kind} and {other.name} that it is {other.cluster_kind}: "
            f"{cannot}; give one of them another cluster or cluster_kind",
        )
    if node.hardware and other.hardware and other.hardware != node.hardware:
        raise IndexRefusal(
            "mixed_hardware",
            f"{node.name} has {node.hardware} and {other.name} has {other.hardware}: {cannot}; "
            "give one of them a cluster of its own",
        )
