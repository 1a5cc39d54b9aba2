"""Twin of instances, caches and links under traffic; `scheduler.route` decides where each request goes."""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prfaas.errors import ConfigError
from prfaas.model.cost.curve import Curve
from prfaas.scheduler.hedge import InboundProgress, RecomputeQueue, decide
from prfaas.scheduler.pd_prefill import NUM_SEEDS
from prfaas.scheduler.rebalance import PlannedCopy
from prfaas.scheduler.route import Decision, route
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.sim.kernel.meter import Load
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.engine import Callbacks, InstanceSpec, Prefill, SimulatedEngine, SimulatedInstance
from prfaas.sim.model.faults import EgressChange, Outage, PlannedEvents, PlannedRoleChange
from prfaas.sim.model.network import Egress, Transfers
from prfaas.sim.model.path_monitor import EgressMonitor
from prfaas.sim.model.policies import STEP_SECONDS, CopyPolicy, PolicyRules, PpdTurns, RolePolicy
from prfaas.sim.model.prefix_cache import CacheRules, NodeCaches
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.model.sharing import SharedInstance, SharingSpec
from prfaas.types import AgentName, ClusterName, InstanceId

# Returns the request that follows an answer, given the moment when the answer ended.
FollowUp = Callable[[SimulatedRequest, float], SimulatedRequest | None]
# Receives each decision with its inputs.
Watch = Callable[[Snapshot, RequestFacts, Decision], None]
DEFAULT_CACHE_BLOCKS = 1 << 16
# Pause between two looks at a transfer, as a share of a local prefill.
_HEDGE_INTERVAL_RATIO = 0.1
# Odd number near the golden section of the seeds' range, whose multiples spread evenly.
_SPREAD = 2654435769


@dataclass(frozen=True)
class SimulatedNode:
    """Machine with one engine. With `sharing` it prefills and decodes at the same time."""

    state: InstanceState
    spec: InstanceSpec
    cache_blocks: int = DEFAULT_CACHE_BLOCKS
    sharing: SharingSpec | None = None


@dataclass(frozen=True)
class NetworkSpec:
    """Network of a twin: S_kv(l), the egress of each cluster, and each node's rate within its cluster."""

    kv: Curve
    egress_bytes_per_second: Mapping[ClusterName, float]
    intra_bytes_per_second: float = math.inf
    rtt_seconds: float = 0.0
    num_layers: int = 1


@dataclass(frozen=True)
class RoutingRules:
    """Fixed part of the snapshot, and rules around the engines.

    With `follows_congestion` t rises while the egress of a cluster is congested. After `hedge_seconds` a decode instance
    computes a prompt itself if its KV would come later than a local prefill ends. `thresholds_by_hour` has t from each
    hour of the day on, ascending from 0, in place of the snapshot's. A run starts at midnight.
    """

    snapshot: Snapshot
    caches: CacheRules = field(default_factory=CacheRules)
    events: PlannedEvents = field(default_factory=PlannedEvents)
    follows_congestion: bool = False
    hedge_seconds: float = math.inf
    thresholds_by_hour: tuple[tuple[float, int], ...] = ()
    policies: PolicyRules = field(default_factory=PolicyRules)

    def threshold_tokens(self, seconds: float) -> int:
        """Return t at a moment of the run."""
        hour = seconds / 3600 % 24
        started = [tokens for start, tokens in self.thresholds_by_hour if start <= hour]
        return started[-1] if started else self.snapshot.threshold_tokens


class Twin:
    """Deployment under traffic. `requests` are all requests in order of arrival."""

    def __init__(
        self,
        nodes: Iterable[SimulatedNode],
        network: NetworkSpec,
        rules: RoutingRules,
        *,
        follow_up: FollowUp | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.timeline = Timeline()
        self.requests: list[SimulatedRequest] = []
        self.rules, self.network, self._follow_up, self._watch = rules, network, follow_up, watch
        self._nodes = {node.state.instance: node for node in nodes}
        self._states = {name: node.state for name, node in self._nodes.items()}
        room = {node.state.agent: node.cache_blocks for node in self._nodes.values()}
        self._caches = NodeCaches(self.timeline, rules.caches, room)
        self.instances = {name: self._engine(node) for name, node in self._nodes.items()}
        # Instances by cluster and role at the start.
        self._groups: dict[str, list[SimulatedEngine]] = {}
        for name, node in self._nodes.items():
            self._groups.setdefault(f"{node.state.cluster} {node.state.role}", []).append(self.instances[name])
        self._clusters = {state.agent: state.cluster for state in self._states.values()}
        self._session_agent: dict[int, AgentName] = {}
        # Decisions of active requests. A request that is sent again is replaced by a fresh one.
        self._decisions: dict[SimulatedRequest, Decision] = {}
        rate = network.egress_bytes_per_second.get
        self.egress = {
            name: Egress(self.timeline, rate(name, math.inf), rtt_seconds=network.rtt_seconds)
            for name in dict.fromkeys(state.cluster for state in self._states.values())
        }
        self._limited = {name: egress for name, egress in self.egress.items() if egress.is_limited}
        self.path_monitor = EgressMonitor(
            self.timeline,
            self._limited,
            list(dict.fromkeys(state.cluster for state in self._states.values() if state.cluster_kind == "pd")),
            threshold_tokens=rules.snapshot.threshold_tokens,
        )
        if rules.follows_congestion and self._limited:
            self.path_monitor.start()
        self._transfers: dict[tuple[InstanceId, ClusterName], Transfers] = {}
        self._arriving: Iterator[SimulatedRequest] = iter(())
        self._recomputes = {name: RecomputeQueue() for name in self._nodes}
        self._dead: set[InstanceId | None] = set()
        self._known_dead: set[InstanceId] = set()
        # The current role change of an instance, and later ones that wait for its end.
        self._role_changes: dict[InstanceId, deque[PlannedRoleChange]] = {}
        self._draining: set[InstanceId] = set()
        self._cold_uses: dict[InstanceId, float] = {}
        table = rules.snapshot.ppd_table
        self._ppd = PpdTurns(table) if table is not None and rules.policies.refreshes_ppd else None
        self.copies: CopyPolicy | None = None
        self._start_policies(rules.policies)
        self._plan_events(rules.events)

    def _start_policies(self, rules: PolicyRules) -> None:
        """Begin to step the policies that managers step twice a second."""
        if rules.best_num_prefill:
            self._role_policy = RolePolicy(rules)
            self.timeline.every(STEP_SECONDS, self._step_roles)
        if rules.rebalance_bytes_per_second:
            clusters = {node.state.agent: node.state.cluster for node in self._nodes.values() if node.cache_blocks}
            self.copies = copies = CopyPolicy(
                rules.rebalance_bytes_per_second, self._caches, clusters, num_bytes=self._prefix_bytes, send=self._copy
            )
            self.timeline.every(STEP_SECONDS, lambda: copies.step(self.timeline.now))

    def _step_roles(self) -> None:
        change = None if self._role_changes else self._role_policy.step(self._states, self.timeline.now)
        if change is not None:
            self._change_role(PlannedRoleChange(change.instance, self.timeline.now, 0.0, change.role))

    def _prefix_bytes(self, num_blocks: int) -> float:
        return self.network.kv(num_blocks * self.rules.caches.block_tokens)

    def _copy(self, copy: PlannedCopy, arrived: Callable[[PlannedCopy], None]) -> None:
        """Send a prefix, within a cluster at a node's own rate, else over the egress of its cluster."""
        source, target = (self._clusters[agent] for agent in (copy.source, copy.destination))
        egress = self.egress[source]
        if source == target:
            egress = Egress(self.timeline, self.network.intra_bytes_per_second)
        egress.send(copy.num_bytes, arrived, copy)

    def _engine(self, node: SimulatedNode) -> SimulatedEngine:
        callbacks = Callbacks(self._send, self._prefilled, self._answered)
        if node.sharing is not None:
            return SharedInstance(self.timeline, node.spec, callbacks, sharing=node.sharing)
        prefills = node.state.role == "prefill"
        spec = replace(node.spec, decode=None, chunk_tokens=None) if prefills else node.spec
        return SimulatedInstance(self.timeline, spec, callbacks)

    def loads(self) -> dict[str, Load]:
        """Return the busy share of each cluster's roles, and each egress in bytes per second."""
        found: dict[str, Load] = {}
        for group, engines in self._groups.items():
            found[f"busy {group}"] = Load([engine.busy for engine in engines], len(engines))
        return found | {f"egress {name}": Load([self.egress[name].sent]) for name in self._limited}

    def run(self, requests: Iterable[SimulatedRequest]) -> None:
        """Run these requests, which ascend by arrival, and the requests that follow them, to their ends; once only."""
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
        self._arrive(request)

    def _arrive(self, request: SimulatedRequest) -> None:
        self.requests.append(request)
        self._route(request)

    def _route(self, request: SimulatedRequest) -> None:
        snapshot, facts = self._inputs(request)
        decision = route(snapshot, facts)
        if self._watch is not None:
            self._watch(snapshot, facts, decision)
        if self._ppd is not None:
            self._ppd.decided(request, snapshot, facts, decision)
        if self.copies is not None:
            self.copies.note(request, facts.cached_tokens, self.rules.caches.block_tokens, self.timeline.now)
        request.reason = decision.reason
        if decision.decode is None:
            return
        self._decisions[request] = decision
        for name in _instances_of(decision):
            self._count(name, 1)
        if not any(facts.cached_tokens.values()):
            self._cold_uses[decision.decode] = self.timeline.now
        self._session_agent[request.session] = self._nodes[decision.decode].state.agent
        self._start(request, decision)

    def _inputs(self, request: SimulatedRequest) -> tuple[Snapshot, RequestFacts]:
        """Return the inputs of `route`."""
        fixed, now = self.rules.snapshot, self.timeline.now
        snapshot = replace(
            fixed,
            threshold_tokens=self.rules.threshold_tokens(now),
            instances=tuple(self._observed() if fixed.local_policy == "endpoint_picker" else self._states.values()),
            ppd_table=self._ppd.table(now) if self._ppd is not None else fixed.ppd_table,
            **self.path_monitor.fields,
        )
        facts = RequestFacts(
            request.num_prompt_tokens,
            num_cached_tokens=0 if request.blocks else request.num_cached_tokens,
            cached_tokens=self._caches.known(request),
            session_agent=self._session_agent.get(request.session) if request.turn > 1 else None,
            turn=request.turn,
            max_output_tokens=request.num_output_tokens,
            # The policy `static` compares seeds with shares of their range.
            seed=(request.index + 1) * (_SPREAD if fixed.local_policy == "static" else 1) % NUM_SEEDS,
        )
        return snapshot, facts

    def _observed(self) -> Iterator[InstanceState]:
        """Yield the instances with what engines and requests in progress tell an endpoint picker."""
        tokens = Counter[InstanceId]()
        for request, decision in self._decisions.items():
            tokens.update(dict.fromkeys(_instances_of(decision), request.num_prompt_tokens))
        for name, state in self._states.items():
            engine = self.instances[name]
            yield replace(
                state,
                num_running=engine.num_running,
                num_waiting=engine.num_waiting,
                kv_usage_ratio=engine.kv_usage_ratio,
                num_in_flight=state.num_requests,
                num_in_flight_tokens=tokens[name],
                last_cold_use=self._cold_uses.get(name),
            )

    def _count(self, name: InstanceId, change: int) -> None:
        num_requests = self._states[name].num_requests + change
        self._set_state(name, num_requests=num_requests)
        if name in self._draining and not num_requests:
            self._drained(name)

    def _start(self, request: SimulatedRequest, decision: Decision) -> None:
        assert decision.decode is not None
        name = decision.prefill or decision.decode
        cached = self._caches.usable(request, self._nodes[name].state.agent)
        new = request.num_prompt_tokens - cached
        request.num_found_tokens = cached
        self.instances[name].prefill(Prefill(request, new, cached, stays=decision.prefill is None))
        if decision.prefill is not None and math.isfinite(self.rules.hedge_seconds):
            local = self._local_seconds(request, decision)
            now = self.timeline.now
            first_check = now + max(self.rules.hedge_seconds, local)
            self.timeline.at(first_check, self._check_hedge, (request, now, local))

    def _local_seconds(self, request: SimulatedRequest, decision: Decision) -> float:
        """Return how long the decode instance would compute the prompt."""
        assert decision.decode is not None
        node = self._nodes[decision.decode]
        cached = self._caches.usable(request, node.state.agent)
        return node.spec.prefill.seconds(request.num_prompt_tokens - cached, cached)

    def _check_hedge(self, wait: tuple[SimulatedRequest, float, float]) -> None:
        """Compute the prompt on the decode instance if its KV would come too late, else look again later."""
        request, since, local = wait
        decision = self._decisions.get(request)
        if decision is None or decision.prefill is None or not math.isnan(request.transfer_end):
            return
        assert decision.decode is not None
        key = decision.prefill, self._nodes[decision.decode].state.cluster
        waited = self.timeline.now - since
        transfers = self._transfers.get(key)
        unstarted = InboundProgress(waited)
        progress = unstarted if transfers is None else transfers.progress(request, waited_seconds=waited)
        queue = self._recomputes[decision.decode]
        local_seconds = queue.local_seconds(local, now=self.timeline.now)
        chosen = decide(progress, local_seconds=local_seconds, min_wait_seconds=self.rules.hedge_seconds)
        if chosen.action == "wait":
            self.timeline.at(self.timeline.now + _HEDGE_INTERVAL_RATIO * local, self._check_hedge, wait)
            return
        queue.add(local, now=self.timeline.now)
        again = self._withdraw(request, decision)
        local_decision = replace(decision, route="local", prefill=None)
        self._decisions[again] = local_decision
        self._count(decision.decode, 1)
        self._start(again, local_decision)
        cluster = self._nodes[decision.prefill].state.cluster
        self.egress[cluster].drop(lambda argument: argument not in self._decisions)

    def _send(self, prefill: Prefill, seconds: float) -> None:
        """Send KV from the start of the last chunk on."""
        decision = self._decisions.get(prefill.request)
        if prefill.stays or decision is None:
            return
        assert decision.prefill is not None
        assert decision.decode is not None
        source, target = self._nodes[decision.prefill].state, self._nodes[decision.decode].state
        num_bytes = self._missing_bytes(prefill.request, target.agent)
        self._transfers_between(source, target.cluster).start(
            prefill.request, num_bytes, prefill_seconds=seconds, arrived=self._arrived
        )

    def _missing_bytes(self, request: SimulatedRequest, agent: AgentName) -> float:
        kv = self.network.kv
        held = self._caches.usable(request, agent)
        return kv(request.num_prompt_tokens) - (kv(held) - kv(0.0))

    def _transfers_between(self, source: InstanceState, target: ClusterName) -> Transfers:
        """Return a node's transfers: within a cluster at its own rate, else over the egress of its cluster."""
        key = source.instance, target
        if key not in self._transfers:
            egress = self.egress[source.cluster]
            if source.cluster == target:
                egress = Egress(self.timeline, self.network.intra_bytes_per_second)
            self._transfers[key] = Transfers(
                self.timeline, egress, num_layers=self.network.num_layers, is_wanted=self._decisions.__contains__
            )
        return self._transfers[key]

    def _prefilled(self, prefill: Prefill) -> None:
        """Keep the prompt's blocks in the cache of its node. A node that prefills for another has finished the request."""
        decision = self._decisions.get(prefill.request)
        if decision is None:
            return
        assert decision.decode is not None
        name = decision.prefill or decision.decode
        self._caches.keep(self._nodes[name].state.agent, prefill.request.blocks)
        if decision.prefill is not None:
            self._count(decision.prefill, -1)

    def _arrived(self, request: SimulatedRequest) -> None:
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
        if self._ppd is not None:
            self._ppd.answered(request, self.timeline.now)
        self._count(decision.decode, -1)
        self._caches.keep(self._nodes[decision.decode].state.agent, request.blocks_after)
        following = self._follow_up(request, self.timeline.now) if self._follow_up else None
        if following is not None:
            self.timeline.at(following.arrival, self._arrive, following)

    # Planned events

    def _plan_events(self, events: PlannedEvents) -> None:
        outages, roles, changes = events.outages, events.role_changes, events.egress_changes
        _refuse_unknown("outages", "instance", (outage.target for outage in outages), self._nodes)
        _refuse_unknown("role_changes", "instance", (change.target for change in roles), self._nodes)
        for change in roles:
            if self._states[change.target].cluster_kind == "prfaas":
                raise ConfigError(f"role_changes: {change.target} is of a PrfaaS cluster, which only prefills")
        clusters = (change.target for change in changes)
        _refuse_unknown("link_changes", "cluster with egress", clusters, self._limited)
        for outage in outages:
            self.timeline.at(outage.start, self._die, outage)
        for change in roles:
            self.timeline.at(change.start, self._change_role, change)
        for egress_change in changes:
            self.timeline.at(egress_change.start, self._change_egress, egress_change)

    def _set_state(self, name: InstanceId, **fields: Any) -> None:
        self._states[name] = replace(self._states[name], **fields)

    def _die(self, outage: Outage) -> None:
        name = outage.target
        self._dead.add(name)
        self.instances[name].stop()
        self._caches.clear(self._nodes[name].state.agent)
        notice = min(self.rules.events.notice_seconds, outage.seconds)
        self.timeline.at(self.timeline.now + notice, self._notice_death, name)
        self.timeline.at(self.timeline.now + outage.seconds, self._return, name)

    def _notice_death(self, name: InstanceId) -> None:
        """Route no more requests to a dead instance, and send its requests again."""
        self._known_dead.add(name)
        self._update_health(name)
        for request, decision in list(self._decisions.items()):
            has_lost = decision.decode == name or (decision.prefill == name and math.isnan(request.transfer_end))
            if has_lost:
                self._send_again(request, decision)

    def _change_egress(self, change: EgressChange) -> None:
        self._limited[change.target].begin_change(change.value)
        if change.seconds > self.rules.events.notice_seconds and not change.value:
            moment = self.timeline.now + self.rules.events.notice_seconds
            self.timeline.at(moment, self._notice_link_down, change.target)
        self.timeline.at(self.timeline.now + change.seconds, self._end_egress_change, change)

    def _notice_link_down(self, cluster: ClusterName) -> None:
        """Mark a cluster's links as down, and prefill elsewhere what was to come over them."""
        self.path_monitor.set_down(cluster, is_down=True)
        for request, decision in list(self._decisions.items()):
            source = decision.prefill and self._nodes[decision.prefill].state.cluster
            if source == cluster and math.isnan(request.transfer_end):
                self._send_again(request, decision)
        self.egress[cluster].drop(lambda request: request not in self._decisions)

    def _end_egress_change(self, change: EgressChange) -> None:
        egress = self._limited[change.target]
        egress.end_change(change.value)
        if not egress.is_down:
            self.path_monitor.set_down(change.target, is_down=False)

    def _send_again(self, request: SimulatedRequest, decision: Decision) -> None:
        self._route(self._withdraw(request, decision))

    def _withdraw(self, request: SimulatedRequest, decision: Decision) -> SimulatedRequest:
        """Take a request from its instances, and return a fresh one in its place."""
        del self._decisions[request]
        assert decision.decode is not None
        self._count(decision.decode, -1)
        if decision.prefill is not None and math.isnan(request.prefill_end):
            self._count(decision.prefill, -1)
            self.instances[decision.prefill].forget(request)
        again = request.again()
        self.requests[self.requests.index(request)] = again
        again.reason = request.reason
        return again

    def _return(self, name: InstanceId) -> None:
        self._dead.discard(name)
        self._known_dead.discard(name)
        self.instances[name].restart()
        self._update_health(name)

    def _update_health(self, name: InstanceId) -> None:
        self._set_state(name, healthy=name not in self._known_dead and name not in self._role_changes)

    def _change_role(self, change: PlannedRoleChange) -> None:
        changes = self._role_changes.setdefault(change.target, deque())
        changes.append(change)
        self._update_health(change.target)
        if len(changes) == 1:
            self._drain(change.target)

    def _drain(self, name: InstanceId) -> None:
        self._draining.add(name)
        if not self._states[name].num_requests:
            self._drained(name)

    def _drained(self, name: InstanceId) -> None:
        self._draining.remove(name)
        change = self._role_changes[name][0]
        self.timeline.at(self.timeline.now + change.seconds, self._end_role_change, change)

    def _end_role_change(self, change: PlannedRoleChange) -> None:
        name = change.target
        self._set_role(change)
        self._role_changes[name].popleft()
        if self._role_changes[name]:
            self._drain(name)
            return
        del self._role_changes[name]
        self._update_health(name)

    def _set_role(self, change: PlannedRoleChange) -> None:
        name = change.target
        self._set_state(name, role=change.value)
        self._nodes[name] = replace(self._nodes[name], state=self._states[name])
        before, after = self.instances[name], self._engine(self._nodes[name])
        after.busy = before.busy
        self.instances[name] = after
        if name in self._dead:
            after.stop()


def _instances_of(decision: Decision) -> set[InstanceId]:
    assert decision.decode is not None
    return {decision.decode, decision.prefill or decision.decode}


def _refuse_unknown(setting: str, kind: str, named: Iterable[str], known: Collection[str]) -> None:
    if unknown := set(named) - set(known):
        accepted = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{setting}: no {kind} {', '.join(sorted(unknown))}; there are {accepted}")
