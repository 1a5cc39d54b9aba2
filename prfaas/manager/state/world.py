"""State of all clusters in this manager: index, membership, operators' orders, and the plan in force."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from prfaas import logs, metrics
from prfaas.errors import IndexRefusal
from prfaas.index.membership import Member, Membership, Node, NodeState, check_consistent
from prfaas.index.memory.index import Index
from prfaas.index.segments import Announcement, Digest, Holding
from prfaas.manager.config import SILENCE_SECONDS
from prfaas.model.planning.plan import PlannedRoute
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import (
    ANNOUNCED,
    announcements_from,
    batch_message,
    figures_from,
    link_message,
    load_message,
    node_from,
    node_message,
    ordered_role_from,
)
from prfaas.scheduler.roles import Role
from prfaas.scheduler.threshold import Supply
from prfaas.types import AgentName, ClusterName, InstanceId, InstanceRole

OFFLOAD_NOTHING = (1 << 31) - 1  # Threshold of a plan under which every prompt stays local.
BatchOutcome = Literal["applied", "known", "gap"]
_ANNOUNCEMENTS_PER_RECORD = 512  # At most 300 KB of full segments.
_log = logs.get("manager")


@dataclass(frozen=True)
class ThresholdPlan:
    """One version of the plan: the threshold, the splits, and the source of each input. Recorded as JSON.

    `splits` are the present instances as [prefill, decode] by PD cluster, and `best_splits` the best possible ones.
    """

    version: int
    made_at: float  # Unix time in seconds.
    threshold_tokens: int
    requests_per_second: float  # Sustained by the deployment.
    offload_ratio: float
    limit: str  # The stage that bounds the deployment.
    splits: Mapping[str, tuple[float, float]]
    best_splits: Mapping[str, tuple[float, float]]
    best_requests_per_second: float
    supplies: Mapping[str, Supply]
    inputs: Mapping[str, str]  # Source of each input, in words.
    roles: Mapping[InstanceId, Role] = field(default_factory=dict)  # These replace the announced roles.
    draining: Mapping[InstanceId, Role] = field(
        default_factory=dict
    )  # Instances without new work, and their next role.
    arrivals_per_second: float = 0.0  # Measured; 0 while unknown.
    ttft_seconds: float | None = None  # Mean at these arrivals with queueing; None if unknown or unbounded.
    # Instances by cluster and role of the cheapest fleet for these arrivals; empty while unknown.
    needed_instances: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    cause: str = ""  # Why this plan was made, in words.
    routes: tuple[PlannedRoute, ...] = ()  # By length and tenant; empty if the threshold decides alone.
    # Estimates for the same traffic without any PrfaaS cluster, with the best split.
    all_local_requests_per_second: float = 0.0
    all_local_ttft_seconds: float | None = None
    # Requests per second that one more instance or Gbit/s adds, by resource.
    resource_values: Mapping[str, float] = field(default_factory=dict)
    # Mean TTFT of the last hour in the twin with the present and with the best splits; None where nothing is answered.
    replayed_ttft_seconds: tuple[float | None, float | None] | None = None
    replay_failure: str = ""  # Why the twin could not confirm a better split or a smaller fleet; empty if it could.

    @property
    def split_gain_ratio(self) -> float:
        """Return how much more the best splits sustain; 0 unless the twin answers the last hour faster with them."""
        before, after = self.replayed_ttft_seconds or (None, None)
        if after is None or (before is not None and after >= before):
            return 0.0
        return self.best_requests_per_second / self.requests_per_second - 1 if self.requests_per_second else math.inf

    def to_json(self) -> bytes:
        """Return the inverse of `from_json`."""
        return msgspec.json.encode(self, enc_hook=float)  # NumPy has floats of its own.

    @staticmethod
    def from_json(data: bytes) -> ThresholdPlan:
        """Decode a plan. Fields that another version of this program added are ignored.

        Raises:
            ValueError: the data is not a plan.
        """
        return msgspec.json.decode(data, type=ThresholdPlan)


class World:
    """State of all clusters as this manager knows it. Single-threaded and never waits; `clock` is monotonic."""

    def __init__(
        self, *, expiry_seconds: float, clock: Callable[[], float], silence_seconds: float = SILENCE_SECONDS
    ) -> None:
        self.index = Index()
        self.membership = Membership(expiry_seconds, silence_seconds)
        self.plan: ThresholdPlan | None = None
        self.version = 0  # Grows with every change that routers should see.
        self._clock = clock
        self._sequences: dict[AgentName, int] = {}  # Last known batch of each node's present epoch.
        self._live: frozenset[AgentName] = frozenset()
        self._heard: frozenset[AgentName] = frozenset()  # Live nodes that are not silent.
        self.silent: frozenset[InstanceId] = frozenset()  # Live instances that are silent, or whose agent is.
        self._draining: dict[AgentName, int] = {}  # Draining nodes, with the epoch that the order is for.
        self._ordered_roles: dict[AgentName, InstanceRole] = {}
        self._changing_role: dict[ClusterName, frozenset[InstanceId]] = {}
        self._complete_since = clock() + expiry_seconds
        # Cached result of `live`, with the versions that it belongs to and the time when it ends.
        self._members: Sequence[Member] = ()
        self._members_key: tuple[int, int, ThresholdPlan | None] | None = None
        self._members_until = 0.0

    @property
    def is_settling(self) -> bool:
        """Return whether a node may be alive that has not reported to this manager yet."""
        return self._clock() < self._complete_since

    def stop_clock(self) -> None:
        """Freeze the clock, so that no node expires while the manager stops."""
        now = self._clock()
        self._clock = lambda: now

    # -- reports of agents

    def register(self, node: Node, *, is_report: bool = True) -> bool:
        """Add or update a node, and return whether that changed anything.

        Only the node's own report counts as a sign of life; `is_report` is false for a node read from a record.

        Raises:
            IndexRefusal: the epoch is older, the cluster differs from before, an instance belongs to another node,
                or the cluster kind differs from the cluster's live nodes.
        """
        known = self.membership.get(node.name)
        if known and known.node.cluster != node.cluster and known.node.epoch == node.epoch:
            raise IndexRefusal(
                "malformed", f"{node.name} is in {known.node.cluster} and cannot be in {node.cluster} too"
            )
        if is_report:
            # All nodes of a cluster share one profile and one plan, and either all or none decode.
            for member in self.membership.live(self._clock()):
                if member.node.cluster == node.cluster and member.node.name != node.name:
                    check_consistent(node, member.node)
        silent = 0.0 if is_report else self.membership.expiry_seconds
        changed = self.membership.register(node, self._clock() - silent)
        if self.index.register(node.name, cluster=node.cluster, epoch=node.epoch, layouts=node.layouts):
            self._sequences[node.name] = 0
            self._live -= {node.name}
            self._heard -= {node.name}
        self.index.set_live(node.name, node.name in self._heard)
        self.refresh()
        self.version += changed
        return changed

    def forget_later_life(self, node: Node) -> bool:
        """Forget a silent entry of this node with a later epoch, which happens if the node's clock went back."""
        known = self.membership.get(node.name)
        self.refresh()
        if known is None or known.node.epoch <= node.epoch or node.name in self._live:
            return False
        self.forget(node.name)
        return True

    def record_report(
        self,
        name: AgentName,
        *,
        epoch: int,
        links: tuple[list[pb.LinkFigures], list[pb.EngineLoad]] | None,
        is_heartbeat: bool = False,
    ) -> None:
        """Record a sign of life, with or without figures.

        Raises:
            IndexRefusal: the node must register first.
        """
        figures = figures_from(*links) if links else None
        now = self._clock()
        self.membership.record_report(name, epoch=epoch, now=now, figures=figures, is_heartbeat=is_heartbeat)
        if name not in self._heard:
            self.refresh()

    def _member(self, name: AgentName) -> Member:
        member = self.membership.get(name)
        if member is None:
            raise IndexRefusal("unknown_node", f"{name} has not registered")
        return member

    def cluster_of(self, name: AgentName) -> ClusterName:
        """Return the cluster of a node.

        Raises:
            IndexRefusal: the node has not registered.
        """
        return self._member(name).node.cluster

    def sequence(self, name: AgentName, epoch: int) -> int:
        """Return the number of the last known batch of this node and epoch.

        Raises:
            IndexRefusal: the node must register first.
        """
        self._check_epoch(name, epoch)
        return self._sequences.get(name, 0)

    def _check_epoch(self, name: AgentName, epoch: int) -> None:
        registered = self._member(name).node.epoch
        if registered != epoch:
            raise IndexRefusal("stale_epoch", f"{name} reports epoch {epoch}; {registered} is registered")

    def apply_batch(self, name: AgentName, *, epoch: int, batch: pb.Batch) -> BatchOutcome:
        """Apply the next batch of a node. Changes that contradict the node's layouts are skipped and counted.

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
            try:
                self.index.apply(name, (announcement,))
            except IndexRefusal as error:
                metrics.MANAGER_REFUSALS.labels(call="ReportEvents", reason=error.reason).inc()
        self._sequences[name] = batch.sequence

    def differs(self, name: AgentName, digests: dict[Holding, Digest]) -> bool:
        """Return whether the index and the node's own digests disagree."""
        return self.index.digests(name) != digests

    # -- nodes that are alive

    def refresh(self) -> None:
        """Remove nodes that are silent or have expired from the answers, and add those that are back."""
        members = self.membership.live(self._clock())
        live = frozenset(member.node.name for member in members)
        heard = frozenset(member.node.name for member in members if member.state is NodeState.LIVE)
        for name in heard ^ self._heard:
            self.index.set_live(name, name in heard)
        silent = frozenset(instance for member in members for instance in silent_instances(member))
        self.version += (live, heard, silent) != (self._live, self._heard, self.silent)
        for instance in silent ^ self.silent:
            _log.info("instance.silent" if instance in silent else "instance.answers", instance=instance)
        self._live, self._heard, self.silent = live, heard, silent

    def heard(self) -> list[Member]:
        """Return the live nodes whose agents are not silent, as `live` does."""
        return [member for member in self.live() if member.state is NodeState.LIVE]

    def live(self) -> Sequence[Member]:
        """Return the nodes that have not expired, with the roles that an operator or the plan in force assigns.

        Returns the same object until a node reports or a role changes.
        """
        now, key = self._clock(), (self.membership.version, self.version, self.plan)
        if key != self._members_key or now >= self._members_until:
            members = self.membership.live(now)
            last_report_at = min((member.last_report_at for member in members), default=float("inf"))
            roles = self.plan.roles if self.plan else {}
            self._members = [self._in_roles(member, roles) for member in members]
            self._members_key = key
            self._members_until = last_report_at + self.membership.expiry_seconds
        return self._members

    def _in_roles(self, member: Member, roles: Mapping[InstanceId, Role]) -> Member:
        announced, ordered = member.node.engines, self._ordered_roles.get(member.node.name)
        if ordered is None and not any(engine.instance in roles for engine in announced):
            return member
        assigned: Mapping[InstanceId, InstanceRole] = (
            roles if ordered is None else {engine.instance: ordered for engine in announced}
        )
        engines = tuple(replace(engine, role=assigned.get(engine.instance, engine.role)) for engine in announced)
        return replace(member, node=replace(member.node, engines=engines))

    def live_member(self, name: AgentName) -> Member:
        """Return a live node in its assigned roles.

        Raises:
            IndexRefusal: the node is unknown or silent.
        """
        for member in self.live():
            if member.node.name == name:
                return member
        raise IndexRefusal("unknown_node", f"{name} is unknown or silent")

    def live_node(self, name: AgentName) -> Node:
        """Return a live node as it registered.

        Raises:
            IndexRefusal: the node is unknown or silent.
        """
        if name not in self._live:
            raise IndexRefusal("unknown_node", f"{name} is unknown or silent")
        return self._member(name).node

    def silent_for(self, seconds: float, cluster: ClusterName) -> list[AgentName]:
        """Return the nodes of a cluster that have not reported for `seconds`."""
        names = self.membership.silent_for(seconds, self._clock())
        return [name for name in names if self.cluster_of(name) == cluster]

    def is_silent(self, cluster: ClusterName, seconds: float) -> bool:
        """Return whether a cluster has nodes, and none has reported for `seconds`."""
        num_nodes = sum(member.node.cluster == cluster for member in self.membership)
        return bool(num_nodes) and len(self.silent_for(seconds, cluster)) == num_nodes

    def forget(self, name: AgentName) -> None:
        self.membership.forget(name)
        self.index.forget(name)
        self._sequences.pop(name, None)
        self._ordered_roles.pop(name, None)
        self._draining.pop(name, None)
        self._live -= {name}
        self._heard -= {name}
        self.version += 1

    def holdings(self) -> list[dict[str, Any]]:
        """Return blocks and payload bytes of live nodes by model, rank, KV group and tier, sorted by cluster and node."""
        records = []
        for member in self.live():
            for holding, digest in sorted(self.index.digests(member.node.name).items()):
                layout = next(layout for layout in member.node.layouts if layout.fingerprint == holding.layout)
                group = layout.groups[holding.group]
                records.append(
                    {
                        "cluster": member.node.cluster,
                        "node": member.node.name,
                        "model": layout.model,
                        "rank": layout.shard.rank,
                        "group": holding.group,
                        "kind": group.kind,
                        "tier": holding.tier,
                        "num_blocks": digest.num_blocks,
                        "num_bytes": digest.num_blocks * group.block_bytes,
                    }
                )
        return sorted(records, key=lambda record: (record["cluster"], record["node"]))

    # -- drains and role changes

    def order_role(self, name: AgentName, role: InstanceRole | None) -> None:
        """Give all instances of a node a role; None restores the roles that they announce."""
        if role is None:
            self._ordered_roles.pop(name, None)
        else:
            self._ordered_roles[name] = role
        self.version += 1

    def set_changing_role(self, cluster: ClusterName, instances: frozenset[InstanceId]) -> None:
        """Set which instances of a cluster are about to take the role that an operator ordered."""
        if instances != self._changing_role.get(cluster, frozenset()):
            self._changing_role[cluster] = instances
            self.version += 1

    @property
    def changing_role(self) -> frozenset[InstanceId]:
        """Return the instances that are about to take an ordered role."""
        return frozenset().union(*self._changing_role.values())

    @property
    def draining(self) -> frozenset[InstanceId]:
        """Return the instances that get no new work because their role is about to change."""
        return self.changing_role | frozenset(self.plan.draining if self.plan else ())

    def drain(self, name: AgentName) -> None:
        """Place nothing more on a node, as long as its agent lives.

        Raises:
            IndexRefusal: the node is unknown or silent.
        """
        self._draining[name] = self.live_node(name).epoch
        self.version += 1

    def undrain(self, name: AgentName) -> None:
        """End the drain of a node, if there is one."""
        if self._draining.pop(name, None) is not None:
            self.version += 1

    @property
    def leaving(self) -> frozenset[AgentName]:
        """Return the live nodes that drain."""
        return frozenset(
            name
            for name, epoch in self._draining.items()
            if name in self._live and (member := self.membership.get(name)) and member.node.epoch == epoch
        )

    @property
    def resting(self) -> frozenset[InstanceId]:
        """Return the live instances that get no new work."""
        leaving = self.leaving
        instances = (
            engine.instance for member in self.live() if member.node.name in leaving for engine in member.node.engines
        )
        return self.draining | self.silent | frozenset(instances)

    # -- from and to the record

    def apply_record(self, data: bytes) -> None:
        """Apply an entry that another manager wrote.

        Raises:
            IndexRefusal: the entry contradicts what is known, and is skipped.
        """
        record = pb.Record.FromString(data)
        match record.WhichOneof("record"):
            case "node":
                self.register(node_from(record.node), is_report=False)
            case "batch":
                name = AgentName(record.batch.node)
                self._check_epoch(name, record.batch.epoch)
                self._apply(name, record.batch.batch)
            case "forgotten":
                self.forget(AgentName(record.forgotten))
            case "ordered_role":
                self.order_role(AgentName(record.ordered_role.node), ordered_role_from(record.ordered_role.role))
            case "leaving":
                self._draining[AgentName(record.leaving.node)] = record.leaving.epoch
                self.version += 1

    def take_orders(self, records: Iterable[bytes]) -> None:
        """Add the nodes and operators' orders of a record that was not read at the start. Memory takes precedence."""
        past = World(expiry_seconds=self.membership.expiry_seconds, clock=self._clock)
        for data in records:
            with contextlib.suppress(IndexRefusal):
                past.apply_record(data)
        for member in past.membership:
            if member.node.name not in self.membership:
                self.register(member.node, is_report=False)
        self._ordered_roles = past._ordered_roles | self._ordered_roles
        self._draining = past._draining | self._draining
        self.version += 1

    def records(self, cluster: ClusterName) -> Iterator[bytes]:
        """Yield a cluster's present state as records. Changes during the iteration may or may not be included."""
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
        """Replace a cluster's nodes and orders by those of its record, without blocks.

        A node whose epoch is unchanged keeps its last sign of life and its figures.
        """
        before = [member for member in self.membership if member.node.cluster == cluster]
        for member in before:
            self.forget(member.node.name)
        for data in records:
            with contextlib.suppress(IndexRefusal):
                self.apply_record(data)
        for member in before:
            node = member.node
            with contextlib.suppress(IndexRefusal):
                self.membership.record_report(
                    node.name, epoch=node.epoch, now=member.last_report_at, figures=member.figures
                )
        self.refresh()

    def keep_alive(self, *, but: Container[ClusterName]) -> None:
        """Keep the live nodes alive, except those of the clusters in `but`, while their reports cannot arrive."""
        for name in self._live:
            node = self.live_node(name)
            if node.cluster not in but:
                is_silent = self.membership.state(name) is NodeState.SILENT
                self.membership.record_report(name, epoch=node.epoch, now=self._clock(), is_silent=is_silent)

    def figures(self, cluster: ClusterName) -> bytes:
        """Encode signs of life and figures of a cluster's nodes, for the other managers."""
        states = [self.node_state(member) for member in self.live() if member.node.cluster == cluster]
        changing = sorted(self._changing_role.get(cluster, ()))
        return pb.ClusterFigures(nodes=states, turning_instances=changing).SerializeToString()

    def node_state(self, member: Member) -> pb.NodeState:
        return pb.NodeState(
            node=node_message(member.node, with_layouts=False),
            silent_seconds=self.silent_seconds(member.node.name),
            links=map(link_message, member.figures.links),
            engines=map(load_message, member.figures.engines),
            is_silent=member.state is NodeState.SILENT,
        )

    def silent_seconds(self, name: AgentName) -> float:
        """Return the seconds since the last report of a node. `live` may return an older time."""
        return self._clock() - self._member(name).last_report_at

    def apply_figures(self, cluster: ClusterName, data: bytes) -> None:
        """Apply the figures that a cluster's writer publishes. Unknown nodes are skipped: the record brings them."""
        now, figures = self._clock(), pb.ClusterFigures.FromString(data)
        self.set_changing_role(cluster, frozenset(map(InstanceId, figures.turning_instances)))
        for state in figures.nodes:
            with contextlib.suppress(IndexRefusal):
                self.membership.record_report(
                    AgentName(state.node.name),
                    epoch=state.node.epoch,
                    now=now - state.silent_seconds,
                    figures=figures_from(state.links, state.engines),
                    is_silent=state.is_silent,
                )
        self.refresh()

    def apply_plan(self, data: bytes) -> None:
        """Adopt the plan that another manager recorded, if it is newer and of a known version."""
        with contextlib.suppress(ValueError):
            plan = ThresholdPlan.from_json(data)
            if self.plan is None or plan.version > self.plan.version:
                self.plan = plan


def silent_instances(member: Member) -> list[InstanceId]:
    """Return the node's instances that are silent: all if its agent is."""
    if member.state is NodeState.SILENT:
        return [engine.instance for engine in member.node.engines]
    return [load.instance for load in member.figures.engines if load.is_silent]


def is_block_record(record: bytes) -> bool:
    """Return whether a record is about blocks. Agents announce those again by themselves."""
    return bool(pb.Record.FromString(record).WhichOneof("record") == "batch")


def node_record(node: Node) -> bytes:
    return pb.Record(node=node_message(node)).SerializeToString()


def batch_record(name: AgentName, epoch: int, batch: pb.Batch) -> bytes:
    return pb.Record(batch=pb.Record.NodeBatch(node=name, epoch=epoch, batch=batch)).SerializeToString()


def leaving_record(node: Node) -> bytes:
    return pb.Record(leaving=pb.Record.Leaving(node=node.name, epoch=node.epoch)).SerializeToString()


def staying_record(name: AgentName) -> bytes:
    """Encode the end of a drain: no agent has epoch 0."""
    return pb.Record(leaving=pb.Record.Leaving(node=name, epoch=0)).SerializeToString()


def role_record(name: AgentName, role: InstanceRole | None) -> bytes:
    """Encode an ordered role; None means the announced role."""
    return pb.Record(ordered_role=pb.Record.OrderedRole(node=name, role=role or ANNOUNCED)).SerializeToString()


def forgotten_record(name: AgentName) -> bytes:
    return pb.Record(forgotten=name).SerializeToString()
