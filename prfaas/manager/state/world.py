"""The plan in force: t, what the split should be, and where each input came from. Plain data, recorded as JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from prfaas import logs, metrics
from prfaas.errors import IndexRefusal
from prfaas.index.membership import Member, Membership, Node, check_beside
from prfaas.index.memory.index import Index
from prfaas.index.segments import Announcement, Digest, Holding
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import (
    ANNOUNCED,
    announcements_from,
    batch_message,
    figures_from,
    node_from,
    node_message,
    ordered_role_from,
)
from prfaas.scheduler.roles import Role
from prfaas.types import AgentName, ClusterName, InstanceId, InstanceRole

# What the operator, or `role_changes`, should do: nothing, change roles to `best_splits`, or give every instance both.
Advice = Literal["keep", "other_split", "do_not_disaggregate"]
OFFLOAD_NOTHING = (1 << 31) - 1  # t of a plan under which every prompt stays


@dataclass(frozen=True)
class ClusterSupply:
    """What a PrfaaS cluster's links take and its instances make, in requests of the mean offloaded length per second."""

    link_requests_per_second: float
    prefill_requests_per_second: float


@dataclass(frozen=True)
class ThresholdPlan:
    """One version. `splits` are instances as [prefill, decode] by PD cluster: as they are, and as would be best."""

    version: int
    made_at: float  # seconds since 1970
    threshold_tokens: int
    requests_per_second: float  # that the deployment sustains
    offload_ratio: float
    limit: str  # the stage that bounds it
    splits: Mapping[str, tuple[float, float]]
    best_splits: Mapping[str, tuple[float, float]]
    best_requests_per_second: float
    supplies: Mapping[str, ClusterSupply]
    inputs: Mapping[str, str]  # each input and its source
    roles: Mapping[InstanceId, Role] = field(default_factory=dict)  # in place of those that instances announce
    draining: Mapping[InstanceId, Role] = field(default_factory=dict)  # get nothing new, and then this role
    arrivals_per_second: float = 0.0  # measured; 0: unknown
    ttft_seconds: float | None = None  # the mean at these arrivals, queues included; None: unknown, or without bound
    undivided_requests_per_second: float = 0.0  # did every PD instance prefill and decode, disturbed by neither
    advice: Advice = "keep"

    def to_json(self) -> bytes:
        """The inverse of `from_json`."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_json(data: bytes) -> ThresholdPlan:
        """Raises ValueError when it is none."""
        try:
            fields: dict[str, Any] = json.loads(data)
            read: dict[str, Any] = {
                name: {cluster: (float(p), float(d)) for cluster, (p, d) in fields[name].items()}
                for name in ("splits", "best_splits")
            }
            read["supplies"] = {cluster: ClusterSupply(**its) for cluster, its in fields["supplies"].items()}
            return ThresholdPlan(**{**fields, **read})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a plan: {error}") from error


REPEAT_SECONDS = 300.0  # between two warnings of one model
_log = logs.get("manager.routing")


class UnknownLayouts:
    """Times are seconds on a clock that only goes forward."""

    def __init__(self) -> None:
        self._warned_at: dict[str, float] = {}  # by model; models are those of registered engines

    def note(self, model: str, now: float) -> None:
        """A request for this model was routed as if nothing of it were cached anywhere."""
        metrics.MANAGER_WITHOUT_LAYOUT.labels(model=model).inc()
        if now < self._warned_at.get(model, -REPEAT_SECONDS) + REPEAT_SECONDS:
            return
        self._warned_at[model] = now
        _log.warning("layout.unknown", model=model, effect="nothing counts as cached: see the connector of its engines")


BatchOutcome = Literal["applied", "known", "gap"]
_ANNOUNCEMENTS_PER_RECORD = 512  # 300 KB of full segments


class World:
    """The state of all clusters in this process. Single-threaded, never waits; `clock` only goes forward."""

    def __init__(self, *, expiry_seconds: float, clock: Callable[[], float]) -> None:
        self.index = Index()
        self.membership = Membership(expiry_seconds)
        self.plan: ThresholdPlan | None = None  # in force
        self.version = 0  # grows with every change that routers should see
        self._clock = clock
        self._sequences: dict[AgentName, int] = {}  # last batch known of each node's present epoch
        self._live: frozenset[AgentName] = frozenset()
        self._draining: dict[AgentName, int] = {}  # with the epoch that was told to
        self._ordered_roles: dict[AgentName, InstanceRole] = {}  # by operators
        self._turning: dict[ClusterName, frozenset[InstanceId]] = {}
        self._settled_at = clock() + expiry_seconds
        self._members: Sequence[Member] = ()  # as `live` found them at these versions, until this time
        self._members_of: tuple[int, int, ThresholdPlan | None] | None = None
        self._members_until = 0.0

    @property
    def is_settling(self) -> bool:
        """Whether a node may be alive that this manager has had no time to hear of."""
        return self._clock() < self._settled_at

    def stop_clock(self) -> None:
        """Nobody will be heard any more, and so nobody falls silent."""
        now = self._clock()
        self._clock = lambda: now

    # -- from agents

    def register(self, node: Node, *, heard: bool = True) -> bool:
        """Make a node known; True when that changes anything. Unless `heard` that is no sign of life.

        Raises:
            IndexRefusal: an older epoch, another cluster than before, an instance that stands elsewhere, or hardware or a kind
                of cluster that is not that of the cluster's live nodes.
        """
        known = self.membership.get(node.name)
        if known and known.node.cluster != node.cluster and known.node.epoch == node.epoch:
            raise IndexRefusal(
                "malformed", f"{node.name} is in {known.node.cluster} and cannot be in {node.cluster} too"
            )
        if heard:
            self._check_cluster(node)
        silent = 0.0 if heard else self.membership.expiry_seconds
        changed = self.membership.register(node, self._clock() - silent)
        if self.index.register(node.name, cluster=node.cluster, epoch=node.epoch, layouts=node.layouts):
            self._sequences[node.name] = 0
            self._live -= {node.name}
        self.index.set_live(node.name, node.name in self._live)
        self.refresh()
        self.version += changed
        return changed

    def forget_later_life(self, node: Node) -> bool:
        """Forget a later life of this node, where there was one and it is silent: the node's clock went back."""
        known = self.membership.get(node.name)
        self.refresh()
        if known is None or known.node.epoch <= node.epoch or node.name in self._live:
            return False
        self.forget(node.name)
        return True

    def _check_cluster(self, node: Node) -> None:
        """One profile, and so one plan, stands for all nodes of a cluster, and all decode or none does."""
        for other in (member.node for member in self.membership.live(self._clock())):
            if other.cluster == node.cluster and other.name != node.name:
                check_beside(node, other)

    def hear(
        self, name: AgentName, *, epoch: int, links: tuple[list[pb.LinkFigures], list[pb.EngineLoad]] | None
    ) -> None:
        """A sign of life, with figures or without.

        Raises:
            IndexRefusal: the node must register first.
        """
        figures = figures_from(*links) if links else None
        self.membership.hear(name, epoch=epoch, now=self._clock(), figures=figures)
        if name not in self._live:
            self.refresh()

    def cluster_of(self, name: AgentName) -> ClusterName:
        """Raises:
        IndexRefusal: the node has not registered.
        """
        member = self.membership.get(name)
        if member is None:
            raise IndexRefusal("unknown_node", f"{name} has not registered")
        return member.node.cluster

    def sequence(self, name: AgentName, epoch: int) -> int:
        """The last batch known of this node and epoch.

        Raises:
            IndexRefusal: the node must register first.
        """
        self._check_epoch(name, epoch)
        return self._sequences.get(name, 0)

    def _check_epoch(self, name: AgentName, epoch: int) -> None:
        member = self.membership.get(name)
        if member is None:
            raise IndexRefusal("unknown_node", f"{name} has not registered")
        if member.node.epoch != epoch:
            raise IndexRefusal("stale_epoch", f"{name} speaks of epoch {epoch}; {member.node.epoch} is registered")

    def apply_batch(self, name: AgentName, *, epoch: int, batch: pb.Batch) -> BatchOutcome:
        """Take the next batch of a node. What contradicts the node's layouts is left out and counted.

        Raises:
            IndexRefusal: the node must register first, or the batch cannot be read.
        """
        known = self.sequence(name, epoch)
        if not batch.reset and batch.sequence != known + 1:
            return "known" if batch.sequence <= known else "gap"
        self._apply(name, batch)
        return "applied"

    def _apply(self, name: AgentName, batch: pb.Batch) -> None:
        announcements = announcements_from(batch)
        if batch.reset:
            self.index.reset(name)
        for announcement in announcements:
            self._apply_one(name, announcement)
        self._sequences[name] = batch.sequence
        metrics.MANAGER_EVENTS.inc(len(announcements))

    def _apply_one(self, name: AgentName, announcement: Announcement) -> None:
        try:
            self.index.apply(name, (announcement,))
        except IndexRefusal as error:
            metrics.MANAGER_REFUSALS.labels(call="ReportEvents", reason=error.reason).inc()

    def differs(self, name: AgentName, digests: dict[Holding, Digest]) -> bool:
        """Whether the index holds anything else of this node than it says."""
        return self.index.digests(name) != digests

    # -- time

    def refresh(self) -> None:
        """Let silent nodes leave the answers, and others come back."""
        live = frozenset(member.node.name for member in self.membership.live(self._clock()))
        for name in live ^ self._live:
            self.index.set_live(name, name in live)
        self.version += live != self._live
        self._live = live

    def live(self) -> Sequence[Member]:
        """The nodes that are alive, their engines in the roles that an operator or the plan in force gives them; the same
        object again as long as nothing is heard of any node."""
        now, its = self._clock(), (self.membership.version, self.version, self.plan)
        if its != self._members_of or now >= self._members_until:
            members = self.membership.live(now)
            heard_at = min((member.heard_at for member in members), default=float("inf"))
            self._members, self._members_of = self._with_roles(members), its
            self._members_until = heard_at + self.membership.expiry_seconds
        return self._members

    def _with_roles(self, members: list[Member]) -> list[Member]:
        roles = self.plan.roles if self.plan else {}
        ordered = self._ordered_roles
        if not roles and not ordered:
            return members
        return [_in_roles(member, roles, ordered.get(member.node.name)) for member in members]

    def order_role(self, name: AgentName, role: InstanceRole | None) -> None:
        """Give all instances of a node a role; None: the one that each announces."""
        if role is None:
            self._ordered_roles.pop(name, None)
        else:
            self._ordered_roles[name] = role
        self.version += 1

    def turn(self, cluster: ClusterName, instances: frozenset[InstanceId]) -> None:
        """These instances of a cluster, and no others, are about to take the role that an operator ordered."""
        if instances != self._turning.get(cluster, frozenset()):
            self._turning[cluster] = instances
            self.version += 1

    @property
    def turning(self) -> frozenset[InstanceId]:
        return frozenset().union(*self._turning.values())

    @property
    def draining(self) -> frozenset[InstanceId]:
        """Instances that are to take another role and get nothing new."""
        return self.turning | frozenset(self.plan.draining if self.plan else ())

    def live_node(self, name: AgentName) -> Node:
        """Raises:
        IndexRefusal: the node is unknown or silent.
        """
        if name not in self._live:
            raise IndexRefusal("unknown_node", f"{name} is unknown or silent")
        member = self.membership.get(name)
        assert member is not None, "what is alive has registered"
        return member.node

    def drain(self, name: AgentName) -> None:
        """Place nothing more on a node, as long as its agent lives.

        Raises:
            IndexRefusal: the node is unknown or silent.
        """
        self._draining[name] = self.live_node(name).epoch
        self.version += 1

    def undrain(self, name: AgentName) -> None:
        """Place on a node again; nothing happens when it was not drained."""
        if self._draining.pop(name, None) is not None:
            self.version += 1

    @property
    def leaving(self) -> frozenset[AgentName]:
        """The live nodes that drain."""
        return frozenset(
            name
            for name, epoch in self._draining.items()
            if name in self._live and (member := self.membership.get(name)) and member.node.epoch == epoch
        )

    @property
    def resting(self) -> frozenset[InstanceId]:
        """The live instances that get nothing new."""
        leaving = self.leaving
        gone = (
            engine.instance for member in self.live() if member.node.name in leaving for engine in member.node.engines
        )
        return self.draining | frozenset(gone)

    def silent_for(self, seconds: float, cluster: ClusterName) -> list[AgentName]:
        """Nodes of a cluster that have not been heard of for so long."""
        names = self.membership.silent_for(seconds, self._clock())
        return [name for name in names if self.cluster_of(name) == cluster]

    def is_silent(self, cluster: ClusterName, seconds: float) -> bool:
        """Whether a cluster has nodes, and none has been heard of for so long."""
        num_nodes = sum(member.node.cluster == cluster for member in self.membership)
        return bool(num_nodes) and len(self.silent_for(seconds, cluster)) == num_nodes

    def forget(self, name: AgentName) -> None:
        self.membership.forget(name)
        self.index.forget(name)
        self._sequences.pop(name, None)
        self._ordered_roles.pop(name, None)
        self._draining.pop(name, None)
        self._live -= {name}
        self.version += 1

    # -- from and to the record

    def apply_record(self, data: bytes) -> None:
        """Take an entry that another manager wrote.

        Raises:
            IndexRefusal: it contradicts what is known; the entry is left out.
        """
        record = pb.Record.FromString(data)
        kind = record.WhichOneof("record")
        if kind == "node":
            self.register(node_from(record.node), heard=False)
        elif kind == "batch":
            its = record.batch
            self._check_epoch(AgentName(its.node), its.epoch)
            self._apply(AgentName(its.node), its.batch)
        elif kind == "forgotten":
            self.forget(AgentName(record.forgotten))
        elif kind == "ordered_role":
            order = record.ordered_role
            self.order_role(AgentName(order.node), ordered_role_from(order.role))
        elif kind == "leaving":
            self._draining[AgentName(record.leaving.node)] = record.leaving.epoch
            self.version += 1

    def take_orders(self, records: Iterable[bytes]) -> None:
        """Take over nodes, and what operators ordered of them, from a record that was not read; what memory has counts
        more."""
        past = World(expiry_seconds=self.membership.expiry_seconds, clock=self._clock)
        for data in records:
            with contextlib.suppress(IndexRefusal):
                past.apply_record(data)
        for member in past.membership:
            if member.node.name not in self.membership:
                self.register(member.node, heard=False)
        self._ordered_roles = past._ordered_roles | self._ordered_roles
        self._draining = past._draining | self._draining
        self.version += 1

    def records(self, cluster: ClusterName) -> Iterator[bytes]:
        """A cluster's present state as records; changes made while iterating may or may not be in it."""
        members = [member for member in self.membership if member.node.cluster == cluster]
        for member in members:
            yield node_record(member.node)
            if member.node.name in self._ordered_roles:
                yield role_record(member.node.name, self._ordered_roles[member.node.name])
            if self._draining.get(member.node.name) == member.node.epoch:
                yield leaving_record(member.node)
        epochs = {member.node.name: member.node.epoch for member in members}
        gathered: dict[AgentName, list[Announcement]] = {}
        for name, announcement in self.index.announcements(epochs.__contains__):
            waiting = gathered.setdefault(name, [])
            waiting.append(announcement)
            if len(waiting) >= _ANNOUNCEMENTS_PER_RECORD:
                yield self._state_record(name, epochs[name], gathered.pop(name))
        for name, epoch in epochs.items():
            yield self._state_record(name, epoch, gathered.get(name, []))

    def _state_record(self, name: AgentName, epoch: int, announcements: list[Announcement]) -> bytes:
        return batch_record(name, epoch, batch_message(self._sequences.get(name, 0), announcements))

    def replace_nodes(self, cluster: ClusterName, records: Iterable[bytes]) -> None:
        """A cluster's nodes, and what operators ordered of them, are those of its record and hold nothing; a node in the
        same life as before stays as alive as it was."""
        before = [member for member in self.membership if member.node.cluster == cluster]
        for member in before:
            self.forget(member.node.name)
        for data in records:
            with contextlib.suppress(IndexRefusal):
                self.apply_record(data)
        for member in before:
            with contextlib.suppress(IndexRefusal):
                its = member.node
                self.membership.hear(its.name, epoch=its.epoch, now=member.heard_at, figures=member.figures)
        self.refresh()

    def keep_alive(self, *, but: Container[ClusterName]) -> None:
        """Nobody can be heard in these clusters' place: the nodes of all others that are alive stay so."""
        for name in self._live:
            its = self.live_node(name)
            if its.cluster not in but:
                self.membership.hear(name, epoch=its.epoch, now=self._clock())

    def figures(self, cluster: ClusterName) -> bytes:
        """Signs of life and figures of a cluster's nodes, for the other managers."""
        now = self._clock()
        states = [node_state(member, now) for member in self.live() if member.node.cluster == cluster]
        turning = sorted(self._turning.get(cluster, ()))
        return pb.ClusterFigures(nodes=states, turning_instances=turning).SerializeToString()

    def apply_figures(self, cluster: ClusterName, data: bytes) -> None:
        """Take what a cluster's writer publishes; nodes that are not known yet come with the record."""
        now, figures = self._clock(), pb.ClusterFigures.FromString(data)
        self.turn(cluster, frozenset(map(InstanceId, figures.turning_instances)))
        for state in figures.nodes:
            try:
                self.membership.hear(
                    AgentName(state.node.name),
                    epoch=state.node.epoch,
                    now=now - state.silent_seconds,
                    figures=figures_from(state.links, state.engines),
                )
            except IndexRefusal:
                continue
        self.refresh()

    def apply_plan(self, data: bytes) -> None:
        """Take the plan that another manager has recorded, when it is newer."""
        with contextlib.suppress(ValueError):  # of a version that is not understood here
            plan = ThresholdPlan.from_json(data)
            if self.plan is None or plan.version > self.plan.version:
                self.plan = plan


def _in_roles(member: Member, roles: Mapping[InstanceId, Role], ordered: InstanceRole | None) -> Member:
    announced = member.node.engines
    assigned: Mapping[InstanceId, InstanceRole] = (
        roles if ordered is None else {its.instance: ordered for its in announced}
    )
    if not any(its.instance in assigned for its in announced):
        return member
    engines = tuple(replace(its, role=assigned.get(its.instance, its.role)) for its in announced)
    return replace(member, node=replace(member.node, engines=engines))


def node_state(member: Member, now: float) -> pb.NodeState:
    its = member.figures
    return pb.NodeState(
        node=node_message(member.node, with_layouts=False),
        silent_seconds=now - member.heard_at,
        links=[pb.LinkFigures(**vars(link)) for link in its.links],
        engines=[pb.EngineLoad(**vars(load)) for load in its.engines],
    )


def is_block_record(record: bytes) -> bool:
    """Whether it is one of those that agents tell again."""
    return bool(pb.Record.FromString(record).WhichOneof("record") == "batch")


def without_block_records(records: Iterable[bytes]) -> list[bytes]:
    """All records but those that agents tell again."""
    return [record for record in records if not is_block_record(record)]


def node_record(node: Node) -> bytes:
    return pb.Record(node=node_message(node)).SerializeToString()


def batch_record(name: AgentName, epoch: int, batch: pb.Batch) -> bytes:
    return pb.Record(batch=pb.Record.NodeBatch(node=name, epoch=epoch, batch=batch)).SerializeToString()


def leaving_record(node: Node) -> bytes:
    return pb.Record(leaving=pb.Record.Leaving(node=node.name, epoch=node.epoch)).SerializeToString()


def staying_record(name: AgentName) -> bytes:
    """Takes a `leaving_record` back: no life of an agent has epoch 0."""
    return pb.Record(leaving=pb.Record.Leaving(node=name, epoch=0)).SerializeToString()


def role_record(name: AgentName, role: InstanceRole | None) -> bytes:
    """None: the role that each instance announces."""
    return pb.Record(ordered_role=pb.Record.OrderedRole(node=name, role=role or ANNOUNCED)).SerializeToString()


def forgotten_record(name: AgentName) -> bytes:
    return pb.Record(forgotten=name).SerializeToString()
