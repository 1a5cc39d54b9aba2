"""What a twin is told of its deployment: nodes, what carries KV between them, and the rules of the route."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prfaas.errors import ConfigError
from prfaas.model.cost.curve import Curve
from prfaas.scheduler.route import Decision, route
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.sim.kernel.meter import LoadSeries, TokenGaps
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.engine import Callbacks, InstanceSpec, Prefill, SimulatedInstance
from prfaas.sim.model.faults import EgressChange, Outage, PlannedEvents, PlannedRoleChange, Shares
from prfaas.sim.model.network import Egress, Transfers
from prfaas.sim.model.path_monitor import PathMonitor
from prfaas.sim.model.prefix_cache import CacheRules, NodeCaches
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.model.sharing import SharedInstance, SharingSpec
from prfaas.types import AgentName, ClusterName, InstanceId

FollowUp = Callable[
    [SimulatedRequest, float], SimulatedRequest | None
]  # the request that an answer calls forth, given when it ended
Watch = Callable[[Snapshot, RequestFacts, Decision], None]  # sees every decision with what it was made from
Assign = Callable[[SimulatedRequest], tuple[Snapshot, frozenset[InstanceId]]]
DEFAULT_CACHE_BLOCKS = 1 << 16


@dataclass(frozen=True)
class SimulatedNode:
    """One machine with one engine: what the scheduler knows of it, how it computes, what its cache may hold.

    With `sharing` it prefills and decodes at the same time.
    """

    state: InstanceState
    spec: InstanceSpec
    cache_blocks: int = DEFAULT_CACHE_BLOCKS
    sharing: SharingSpec | None = None


@dataclass(frozen=True)
class NetworkSpec:
    """What carries KV: S_kv(l), each cluster's egress to others, each node's rate within its cluster.

    `setup_seconds` pass before each transfer's first byte. With `sends_all` also what the receiver holds is sent.
    """

    kv: Curve
    egress_bytes_per_second: Mapping[ClusterName, float]
    intra_bytes_per_second: float = math.inf
    rtt_seconds: float = 0.0
    setup_seconds: float = 0.0
    num_layers: int = 1
    sends_all: bool = False
    loss_ratio: float = 0.0  # as TCP reports it; the rates above already bear it


@dataclass(frozen=True)
class RoutingRules:
    """The snapshot's fixed part, and what stands before the engines.

    A request takes `overhead_seconds` and `overhead_per_token_seconds` for each prompt token before its engine has it.
    No more than `max_sessions` conversations are under way; the others wait before they are routed. `assign` gives a
    request rules of its own, and the decode instances that it may not go to. With `follows_congestion` t rises while the
    egress of a cluster is congested.
    """

    snapshot: Snapshot
    caches: CacheRules = field(default_factory=CacheRules)
    overhead_seconds: float = 0.0
    overhead_per_token_seconds: float = 0.0
    max_sessions: float = math.inf
    assign: Assign | None = None
    operations: PlannedEvents = field(default_factory=PlannedEvents)
    follows_congestion: bool = False


_NOBODY: frozenset[InstanceId] = frozenset()


def _refuse_unknown(setting: str, what: str, named: Iterable[str], known: Collection[str]) -> None:
    if unknown := set(named) - set(known):
        there = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{setting}: no {what} {', '.join(sorted(unknown))}; there are {there}")


class Twin:
    """A deployment at work. `requests` are all that have arrived, in that order; `gaps` their inter-token gaps;
    `area` is the time integral of how many were here."""

    def __init__(
        self,
        nodes: Iterable[SimulatedNode],
        wires: NetworkSpec,
        rules: RoutingRules,
        *,
        follow_up: FollowUp | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.timeline = Timeline()
        self.requests: list[SimulatedRequest] = []
        self.gaps = TokenGaps()
        self.rules, self.wires, self._follow_up, self._watch = rules, wires, follow_up, watch
        self._nodes = {node.state.instance: node for node in nodes}
        self._states = [node.state for node in self._nodes.values()]
        self._position = {name: index for index, name in enumerate(self._nodes)}
        room = {node.state.agent: node.cache_blocks for node in self._nodes.values()}
        self._caches = NodeCaches(self.timeline, rules.caches, room)
        self.instances = {name: self._engine(node) for name, node in self._nodes.items()}
        self._groups = self._by_cluster_and_role()
        self._session_agent: dict[int, AgentName] = {}
        self._decisions: dict[SimulatedRequest, Decision] = {}
        self.egress = {
            name: Egress(self.timeline, wires.egress_bytes_per_second.get(name, math.inf))
            for name in dict.fromkeys(state.cluster for state in self._states)
        }
        self._shares = {
            name: Shares(egress, egress.bytes_per_second)
            for name, egress in self.egress.items()
            if math.isfinite(egress.bytes_per_second)
        }
        self.links = self._watched_links()
        self._paths: dict[tuple[InstanceId, ClusterName], Transfers] = {}
        self._arriving: Iterator[SimulatedRequest] = iter(())
        self._outside: deque[SimulatedRequest] = deque()
        self._num_sessions = 0
        self.area = 0.0
        self._present, self._present_since = 0, 0.0
        self._dead: set[InstanceId | None] = set()
        self._known_dead: set[InstanceId] = set()
        self._changes: dict[
            InstanceId, deque[PlannedRoleChange]
        ] = {}  # the one under way, and those that wait for its end
        self._draining: set[InstanceId] = set()
        self._plan_operations(rules.operations)

    def _by_cluster_and_role(self) -> dict[str, list[SimulatedInstance | SharedInstance]]:
        """Return the instances by their role at the start."""
        groups: dict[str, list[SimulatedInstance | SharedInstance]] = {}
        for node in self._nodes.values():
            group = f"{node.state.cluster} {node.state.role}"
            groups.setdefault(group, []).append(self.instances[node.state.instance])
        return groups

    def _watched_links(self) -> PathMonitor:
        return PathMonitor(
            self.timeline,
            {name: self.egress[name] for name in self._shares},
            list(dict.fromkeys(state.cluster for state in self._states if state.cluster_kind == "pd")),
            under_way=self._decisions,
            threshold_tokens=self.rules.snapshot.threshold_tokens,
            loss_ratio=self.wires.loss_ratio,
        )

    def _engine(self, node: SimulatedNode) -> SimulatedInstance | SharedInstance:
        callbacks = Callbacks(self._send, self._prefilled, self._answered)
        if node.sharing is not None:
            return SharedInstance(self.timeline, node.spec, callbacks, self.gaps, sharing=node.sharing)
        prefills = node.state.role == "prefill"
        spec = replace(node.spec, decode=None, chunk_tokens=None) if prefills else node.spec
        return SimulatedInstance(self.timeline, spec, callbacks, self.gaps)

    def loads(self) -> dict[str, LoadSeries]:
        """How busy each cluster's instances of a role are, how full their KV memory is, and each egress in bytes/s."""
        found: dict[str, LoadSeries] = {}
        for group, engines in self._groups.items():
            found[f"busy {group}"] = LoadSeries([engine.busy for engine in engines], len(engines))
            room = sum(engine.kv_tokens for engine in engines)
            if math.isfinite(room):
                found[f"memory {group}"] = LoadSeries([engine.held for engine in engines], room)
        return found | {f"egress {name}": LoadSeries([self.egress[name].sent]) for name in self._shares}

    def run(self, requests: Iterable[SimulatedRequest]) -> None:
        """Take these requests, which ascend by arrival, and what follows them, and let all of them end. Once."""
        self._arriving = iter(requests)
        self._await_next()
        try:
            self.timeline.run()
        finally:
            self._caches.close()

    def _await_next(self) -> None:
        request = next(self._arriving, None)
        if request is not None:
            self.timeline.at(request.arrival, self._take_next, request)

    def _take_next(self, request: SimulatedRequest) -> None:
        self._await_next()
        if self._num_sessions < self.rules.max_sessions:
            self._num_sessions += 1
            self._arrive(request)
        else:
            self._outside.append(request)

    def _arrive(self, request: SimulatedRequest) -> None:
        self._count_present(1)
        request.admitted = self.timeline.now
        self.requests.append(request)
        self._route(request)

    def _route(self, request: SimulatedRequest) -> None:
        base, excluded = self.rules.assign(request) if self.rules.assign else (self.rules.snapshot, _NOBODY)
        snapshot = replace(base, instances=tuple(self._states), **self.links.fields)
        facts = self._facts(request, excluded)
        decision = route(snapshot, facts)
        if self._watch is not None:
            self._watch(snapshot, facts, decision)
        request.reason = decision.reason
        if decision.decode is None:
            self._count_present(-1)
            self._end_session()
            return
        where = self._nodes[decision.prefill or decision.decode].state.agent
        request.num_known_tokens = min(facts.cached_at(where), request.num_prompt_tokens - 1)
        self._decisions[request] = decision
        if self.rules.follows_congestion and self._shares:
            self.links.wake()
        for name in {decision.decode, decision.prefill or decision.decode}:
            self._count(name, 1)
        self._session_agent[request.session] = self._nodes[decision.decode].state.agent
        overhead = self.rules.overhead_seconds + self.rules.overhead_per_token_seconds * request.num_prompt_tokens
        self.timeline.at(self.timeline.now + overhead, self._start, request)

    def _facts(self, request: SimulatedRequest, excluded: frozenset[InstanceId]) -> RequestFacts:
        return RequestFacts(
            request.num_prompt_tokens,
            num_cached_tokens=0 if request.blocks else request.num_cached_tokens,
            cached_tokens=self._caches.known(request),
            session_agent=self._session_agent.get(request.session) if request.turn > 1 else None,
            turn=request.turn,
            max_output_tokens=request.num_output_tokens,
            excluded=excluded,
            seed=request.index + 1,
        )

    def _count_present(self, change: int) -> None:
        self.area += self._present * (self.timeline.now - self._present_since)
        self._present, self._present_since = self._present + change, self.timeline.now

    def _count(self, name: InstanceId, change: int) -> None:
        position = self._position[name]
        state = self._states[position]
        self._states[position] = replace(state, num_requests=state.num_requests + change)
        if name in self._draining and not self._states[position].num_requests:
            self._drained(name)

    def _start(self, request: SimulatedRequest) -> None:
        decision = self._decisions.get(request)
        if decision is None:  # it was sent again
            return
        assert decision.decode is not None
        name = decision.prefill or decision.decode
        cached = self._caches.usable(request, self._nodes[name].state.agent)
        new = request.num_prompt_tokens - cached
        request.num_found_tokens = cached
        self.instances[name].prefill(Prefill(request, new, cached, stays=decision.prefill is None))

    def _send(self, prefill: Prefill, seconds: float) -> None:
        """The last chunk starts: from here on its layers leave."""
        decision = self._decisions.get(prefill.request)
        if prefill.stays or decision is None:
            return
        assert decision.prefill is not None
        assert decision.decode is not None
        source, target = self._nodes[decision.prefill].state, self._nodes[decision.decode].state
        path = self._path(source, target.cluster)
        num_bytes = self._missing_bytes(prefill.request, target.agent)
        path.start(prefill.request, num_bytes, prefill_seconds=seconds, arrived=self._arrived)

    def _missing_bytes(self, request: SimulatedRequest, agent: AgentName) -> float:
        kv = self.wires.kv
        held = 0 if self.wires.sends_all else self._caches.usable(request, agent)
        return kv(request.num_prompt_tokens) - (kv(held) - kv(0.0))

    def _path(self, source: InstanceState, target: ClusterName) -> Transfers:
        """Within a cluster each node sends for itself; between clusters all nodes share their cluster's egress."""
        known = self._paths.get((source.instance, target))
        if known is None:
            wires = self.wires
            within = source.cluster == target
            rate = wires.intra_bytes_per_second
            egress = Egress(self.timeline, rate) if within else self.egress[source.cluster]
            link = egress.link(math.inf, rtt_seconds=0.0 if within else wires.rtt_seconds)
            known = Transfers(
                self.timeline, egress, link, num_layers=wires.num_layers, is_wanted=self._decisions.__contains__
            )
            self._paths[source.instance, target] = known
        return known

    def _prefilled(self, prefill: Prefill) -> None:
        """The prompt's blocks are in its node's cache; who prefilled for another is done with it."""
        decision = self._decisions.get(prefill.request)
        if decision is None:
            return
        assert decision.decode is not None
        name = decision.prefill or decision.decode
        self._caches.keep(self._nodes[name].state.agent, prefill.request.blocks)
        if decision.prefill is not None:
            self._count(decision.prefill, -1)

    def _arrived(self, request: SimulatedRequest) -> None:
        if self.wires.setup_seconds:
            self.timeline.at(self.timeline.now + self.wires.setup_seconds, self._hand_over, request)
        else:
            self._hand_over(request)

    def _hand_over(self, request: SimulatedRequest) -> None:
        decision = self._decisions.get(request)
        if decision is None or decision.prefill in self._dead:
            return
        assert decision.decode is not None
        request.transfer_end = self.timeline.now
        self._caches.keep(self._nodes[decision.decode].state.agent, request.blocks)
        self.instances[decision.decode].decode(request)

    def _answered(self, request: SimulatedRequest) -> None:
        decision = self._decisions.pop(request)
        assert decision.decode is not None
        self._count_present(-1)
        self._count(decision.decode, -1)
        self._caches.keep(self._nodes[decision.decode].state.agent, request.blocks_after)
        following = self._follow_up(request, self.timeline.now) if self._follow_up else None
        if following is None:
            self._end_session()
        else:
            self.timeline.at(following.arrival, self._arrive, following)

    def _end_session(self) -> None:
        self._num_sessions -= 1
        if self._outside:
            self._num_sessions += 1
            self._arrive(self._outside.popleft())

    # Operations

    def _plan_operations(self, operations: PlannedEvents) -> None:
        _refuse_unknown("outages", "instance", (outage.instance for outage in operations.outages), self._nodes)
        _refuse_unknown(
            "role_changes", "instance", (change.instance for change in operations.role_changes), self._nodes
        )
        only_prefill = {state.instance for state in self._states if state.cluster_kind == "prfaas"}
        for change in operations.role_changes:
            if change.instance in only_prefill:
                raise ConfigError(f"role_changes: {change.instance} is of a PrfaaS cluster, which only prefills")
        clusters = (change.cluster for change in operations.link_changes)
        _refuse_unknown("link_changes", "cluster with egress", clusters, self._shares)
        for outage in operations.outages:
            self.timeline.at(outage.start, self._die, outage)
        for change in operations.role_changes:
            self.timeline.at(change.start, self._change_role, change)
        for link in operations.link_changes:
            self.timeline.at(link.start, self._change_link, link)

    def _set(self, name: InstanceId, **fields: Any) -> None:
        position = self._position[name]
        self._states[position] = replace(self._states[position], **fields)

    def _die(self, outage: Outage) -> None:
        name = outage.instance
        self._dead.add(name)
        self.instances[name].stop()
        self._caches.clear(self._nodes[name].state.agent)
        notice = min(self.rules.operations.notice_seconds, outage.seconds)
        self.timeline.at(self.timeline.now + notice, self._notice, name)
        self.timeline.at(self.timeline.now + outage.seconds, self._return, name)

    def _notice(self, name: InstanceId) -> None:
        """Its heartbeats have been missing for long enough: nothing is sent there, what was there is sent again."""
        self._known_dead.add(name)
        self._tell_health(name)
        for request, decision in list(self._decisions.items()):
            has_lost = decision.decode == name or (decision.prefill == name and math.isnan(request.transfer_end))
            if has_lost:
                self._send_again(request, decision)

    def _change_link(self, change: EgressChange) -> None:
        self._shares[change.cluster].begin(change)
        if change.seconds > self.rules.operations.notice_seconds and not change.share:
            moment = self.timeline.now + self.rules.operations.notice_seconds
            self.timeline.at(moment, self._notice_link, change.cluster)
        self.timeline.at(self.timeline.now + change.seconds, self._end_link_change, change)

    def _notice_link(self, cluster: ClusterName) -> None:
        """Nothing has come over a cluster's links for long enough: what was to come from there is prefilled elsewhere."""
        self.links.set_down(cluster, is_down=True)
        for request, decision in list(self._decisions.items()):
            source = decision.prefill and self._nodes[decision.prefill].state.cluster
            if source == cluster and math.isnan(request.transfer_end):
                self._send_again(request, decision)
        self.egress[cluster].drop(lambda request: request not in self._decisions)

    def _end_link_change(self, change: EgressChange) -> None:
        shares = self._shares[change.cluster]
        shares.end(change)
        if not shares.is_down:
            self.links.set_down(change.cluster, is_down=False)

    def _send_again(self, request: SimulatedRequest, decision: Decision) -> None:
        del self._decisions[request]
        assert decision.decode is not None
        self._count(decision.decode, -1)
        if decision.prefill is not None and math.isnan(request.prefill_end):
            self._count(decision.prefill, -1)
            self.instances[decision.prefill].forget(request)
        again = request.again()
        self.requests[self.requests.index(request)] = again
        self._route(again)

    def _return(self, name: InstanceId) -> None:
        self._dead.discard(name)
        self._known_dead.discard(name)
        self.instances[name].restart()
        self._tell_health(name)

    def _tell_health(self, name: InstanceId) -> None:
        self._set(name, healthy=name not in self._known_dead and name not in self._changes)

    def _change_role(self, change: PlannedRoleChange) -> None:
        changes = self._changes.setdefault(change.instance, deque())
        changes.append(change)
        self._tell_health(change.instance)
        if len(changes) == 1:
            self._drain(change.instance)

    def _drain(self, name: InstanceId) -> None:
        self._draining.add(name)
        if not self._states[self._position[name]].num_requests:
            self._drained(name)

    def _drained(self, name: InstanceId) -> None:
        self._draining.remove(name)
        change = self._changes[name][0]
        self.timeline.at(self.timeline.now + change.seconds, self._become, change)

    def _become(self, change: PlannedRoleChange) -> None:
        name = change.instance
        self._take_role(change)
        self._changes[name].popleft()
        if self._changes[name]:
            self._drain(name)
            return
        del self._changes[name]
        self._tell_health(name)

    def _take_role(self, change: PlannedRoleChange) -> None:
        name = change.instance
        self._set(name, role=change.role)
        self._nodes[name] = replace(self._nodes[name], state=self._states[self._position[name]])
        before, after = self.instances[name], self._engine(self._nodes[name])
        after.busy, after.held = before.busy, before.held
        self.instances[name] = after
        if name in self._dead:
            after.stop()
