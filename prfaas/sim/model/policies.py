"""Policies that managers run beside the routes: role changes, copies of hot prefixes, and refreshed PPD tables."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prfaas.hashing import HASH_BYTES, HASH_UNIT_TOKENS
from prfaas.scheduler.pd_prefill import WAS_LOCAL, later_turn
from prfaas.scheduler.popularity import Popularity
from prfaas.scheduler.ppd import LaterTurn, PpdRefresh, PpdTable, ServedTurn
from prfaas.scheduler.rebalance import HotPrefix, Participants, PlannedCopy, RebalanceLimits, RebalanceState
from prfaas.scheduler.rebalance import step as rebalance
from prfaas.scheduler.roles import ClusterRoles, RoleChange, RoleRules, RoleWishes, Stage
from prfaas.scheduler.roles import step as step_roles
from prfaas.scheduler.route import Decision
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.sim.model.prefix_cache import NodeCaches
from prfaas.sim.model.request import SimulatedRequest
from prfaas.types import AgentName, BlockHash, ClusterName, InstanceId, Prefix

# As in managers.
STEP_SECONDS = 0.5
_SMOOTHING_SECONDS = 5.0
_MAX_PREFIXES = 64
_MODEL = "simulated"


@dataclass(frozen=True)
class PolicyRules:
    """Policies of a run. Without `best_num_prefill` roles stay, and at 0 bytes per second nothing is copied."""

    best_num_prefill: Mapping[ClusterName, float] = field(default_factory=dict)
    gain_ratio: float = 0.0
    max_batch: int = 1
    role_rules: RoleRules = field(default_factory=lambda: RoleRules(lasting_seconds=60.0, min_gain_ratio=0.05))
    rebalance_bytes_per_second: float = 0.0
    refreshes_ppd: bool = False


class RolePolicy:
    """Role changes by utilization, as `scheduler.roles` decides them."""

    def __init__(self, rules: PolicyRules) -> None:
        self._rules, self._wishes = rules, RoleWishes()
        self._utilization: dict[tuple[ClusterName, str], float] = {}

    def step(self, states: Mapping[InstanceId, InstanceState], now: float) -> RoleChange | None:
        """Return the change to begin now; to be called every `STEP_SECONDS` while no change is in progress."""
        clusters = []
        for name, best in self._rules.best_num_prefill.items():
            own = [state for state in states.values() if state.cluster == name and state.healthy]
            prefill = self._stage(name, {s.instance: s.num_requests for s in own if s.role == "prefill"}, "prefill", 1)
            decoding = {state.instance: state.num_requests for state in own if state.role == "decode"}
            decode = self._stage(name, decoding, "decode", self._rules.max_batch)
            clusters.append(ClusterRoles(name, prefill, decode, best))
        self._wishes, change = step_roles(
            self._wishes, clusters, gain_ratio=self._rules.gain_ratio, rules=self._rules.role_rules, now=now
        )
        return change

    def _stage(self, cluster: ClusterName, requests: Mapping[InstanceId, int], role: str, capacity: int) -> Stage:
        present = sum(min(1.0, count / capacity) for count in requests.values()) / max(1, len(requests))
        before = self._utilization.get((cluster, role), present)
        smoothed = before + (1 - math.exp(-STEP_SECONDS / _SMOOTHING_SECONDS)) * (present - before)
        self._utilization[cluster, role] = smoothed
        return Stage(requests, smoothed)


class CopyPolicy:
    """Copies of hot prefixes, as `scheduler.rebalance` orders them. `send` moves the bytes and calls back."""

    def __init__(
        self,
        rate: float,
        caches: NodeCaches,
        clusters: Mapping[AgentName, ClusterName],
        *,
        num_bytes: Callable[[int], float],
        send: Callable[[PlannedCopy, Callable[[PlannedCopy], None]], None],
    ) -> None:
        self._caches, self._clusters, self._num_bytes, self._send = caches, clusters, num_bytes, send
        self._limits = RebalanceLimits(egress_bytes_per_second=rate, intake_bytes_per_second=rate / 2)
        self._popularity, self._state = Popularity(), RebalanceState()
        self._under_way: dict[PlannedCopy, list[BlockHash]] = {}
        self.num_copies = 0

    def note(self, request: SimulatedRequest, known: Mapping[AgentName, int], block_tokens: int, now: float) -> None:
        """Count the longest prefix of a request that a node has. Each block stands for one unit of hashes."""
        num_tokens = max(known.values(), default=0) // block_tokens * HASH_UNIT_TOKENS
        self._popularity.hit(_MODEL, b"".join(request.blocks), num_tokens, checkpoints=(), now=now)

    def step(self, now: float) -> None:
        """Order the copies that are due."""
        hot = [self._hot(*found) for found in self._popularity.hottest(_MAX_PREFIXES, 1.0, now=now)]
        blocks = {prefix.key: chain for prefix, chain in hot}
        everyone = frozenset(self._clusters)
        participants = Participants(self._clusters, everyone, under_way=tuple(self._under_way))
        prefixes = [prefix for prefix, _ in hot]
        self._state, copies = rebalance(self._state, prefixes, participants, now=now, limits=self._limits)
        for copy in copies:
            self._under_way[copy] = blocks[copy.key]
            self._send(copy, self._arrived)

    def _hot(self, prefix: Prefix, rate: float) -> tuple[HotPrefix, list[BlockHash]]:
        units = prefix.units
        chain = [BlockHash(units[start : start + HASH_BYTES]) for start in range(0, len(units), HASH_BYTES)]
        holders = frozenset(agent for agent in self._clusters if self._caches.holds(agent, chain))
        num_bytes = int(self._num_bytes(len(chain)))
        return HotPrefix((_MODEL, prefix.end_hash), rate, num_bytes, frozenset(self._clusters), holders), chain

    def _arrived(self, copy: PlannedCopy) -> None:
        self.num_copies += 1
        self._caches.keep(copy.destination, self._under_way.pop(copy))


class PpdTurns:
    """PPD table that follows the turns served."""

    def __init__(self, table: PpdTable) -> None:
        self._refresh = PpdRefresh(table)
        self._turns: dict[SimulatedRequest, tuple[LaterTurn, float, bool]] = {}

    def table(self, now: float) -> PpdTable:
        """Return the table of late."""
        return self._refresh.current(now)

    def decided(self, request: SimulatedRequest, snapshot: Snapshot, facts: RequestFacts, decision: Decision) -> None:
        """Remember a turn that the table decided."""
        was_local = WAS_LOCAL.get(decision.reason)
        if was_local is not None:
            decode = next(state for state in snapshot.instances if state.instance == decision.decode)
            self._turns[request] = later_turn(facts, decode), snapshot.requests_per_second, was_local

    def answered(self, request: SimulatedRequest, now: float) -> None:
        """Note how the turn was served."""
        turn = self._turns.pop(request, None)
        if turn is not None:
            tpot = request.tpot or None
            self._refresh.note(ServedTurn(*turn, ttft_seconds=request.ttft, tpot_seconds=tpot, at=now))
