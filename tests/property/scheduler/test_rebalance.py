"""Rebalancing under random histories: budgets hold, copies end, and no holder gets a copy."""

import random
from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.rebalance import (
    HotPrefix,
    Participants,
    PlannedCopy,
    PrefixKey,
    RebalanceLimits,
    RebalanceState,
    step,
)
from prfaas.types import AgentName, BlockHash, ClusterName

LIMITS = RebalanceLimits(
    1000.0, 400.0, hits_per_holder_per_second=1.0, max_holders=4, repeat_seconds=60.0, burst_seconds=5.0
)
KEYS: list[PrefixKey] = [("m", BlockHash(bytes([number]) * 16)) for number in range(4)]


@dataclass
class _World:
    """Nodes that hold prefixes, evict them at random, come and go; copies take some steps."""

    chance: random.Random
    state: RebalanceState = field(default_factory=RebalanceState)
    clusters: dict[AgentName, ClusterName] = field(default_factory=dict)
    holders: dict[PrefixKey, set[AgentName]] = field(default_factory=lambda: defaultdict(set))
    under_way: list[tuple[float, PlannedCopy]] = field(default_factory=list)
    ordered: list[tuple[float, PlannedCopy]] = field(default_factory=list)
    joined: dict[AgentName, float] = field(default_factory=dict)

    def join(self, now: float) -> None:
        name = AgentName(f"n{len(self.joined)}")
        self.joined[name] = now
        self.clusters[name] = ClusterName(self.chance.choice(["east", "west"]))

    def change(self, now: float) -> None:
        if self.chance.random() < 0.1:
            self.join(now)
        for key in KEYS:
            if self.holders[key] and self.chance.random() < 0.1:
                self.holders[key].discard(self.chance.choice(sorted(self.holders[key])))
            if not self.holders[key]:
                self.holders[key].add(self.chance.choice(sorted(self.clusters)))
        for due, move in list(self.under_way):
            if now >= due:
                self.under_way.remove((due, move))
                self.holders[move.key].add(move.destination)

    def step(self, now: float) -> list[PlannedCopy]:
        prefixes = [
            HotPrefix(
                key,
                self.chance.choice([0.0, 0.6, 1.4, 2.0, 5.0, 50.0]),
                num_bytes=200 * (index + 1),
                nodes=frozenset(self.clusters),
                holders=frozenset(self.holders[key]),
            )
            for index, key in enumerate(KEYS)
        ]
        moving = tuple(move for _, move in self.under_way)
        full = frozenset({(ClusterName("east"), ClusterName("west"))} if self.chance.random() < 0.5 else ())
        leaving = frozenset(name for name in self.clusters if self.chance.random() < 0.1)
        cast = Participants(dict(self.clusters), frozenset(self.clusters), leaving, full, moving)
        self.state, moves = step(self.state, prefixes, cast, now=now, limits=LIMITS)
        for move in moves:
            assert move.source in self.holders[move.key] and move.destination not in self.holders[move.key]
            assert move.destination not in leaving
            assert (self.clusters[move.source], self.clusters[move.destination]) not in full
            self.under_way.append((now + self.chance.choice([0.5, 2.0, 10.0]), move))
            self.ordered.append((now, move))
        return moves


def _history(seed: int, num_steps: int) -> _World:
    world = _World(random.Random(seed))
    for _ in range(5):
        world.join(0.0)
    for number in range(num_steps):
        world.change(number * 0.5)
        world.step(number * 0.5)
        destinations = [move.destination for _, move in world.under_way]
        assert len(destinations) == len(set(destinations)), "a node takes one copy at a time"
    return world


@given(st.integers(0, 1 << 32))
def test_no_time_window_exceeds_a_budget(seed: int) -> None:
    world = _history(seed, 80)
    sent: dict[str, list[tuple[float, int]]] = defaultdict(list)
    received: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for at, move in world.ordered:
        sent[world.clusters[move.source]].append((at, move.num_bytes))
        received[move.destination].append((at, move.num_bytes))
    for rate, flows in ((LIMITS.egress_bytes_per_second, sent), (LIMITS.intake_bytes_per_second, received)):
        for flow in flows.values():
            for first, (start, _) in enumerate(flow):
                total = 0
                for at, num_bytes in flow[first:]:
                    total += num_bytes
                    assert total <= rate * (at - start + LIMITS.burst_seconds) + 1e-6


@given(st.integers(0, 1 << 32))
def test_node_gets_no_prefix_twice_within_the_pause(seed: int) -> None:
    last: dict[tuple[PrefixKey, AgentName], float] = {}
    for at, move in _history(seed, 200).ordered:
        before = last.get((move.key, move.destination))
        assert before is None or at - before >= LIMITS.repeat_seconds
        last[move.key, move.destination] = at


@given(st.integers(0, 1 << 32), st.floats(0.5, 20.0))
def test_wavering_rate_causes_no_endless_copies(seed: int, rate: float) -> None:
    chance = random.Random(seed)
    names = [AgentName(f"n{number}") for number in range(6)]
    cast = Participants(dict.fromkeys(names, ClusterName("east")), frozenset(names))
    holders, state = {names[0]}, RebalanceState()
    for number in range(400):
        wavering = rate * chance.uniform(0.75, 1.25)
        prefix = HotPrefix(KEYS[0], wavering, 100, frozenset(names), frozenset(holders))
        state, moves = step(state, [prefix], cast, now=number * 0.5, limits=LIMITS)
        holders.update(move.destination for move in moves)
    assert len(holders) <= max(1, min(LIMITS.max_holders, int(rate * 1.25)))
    assert len(holders) >= max(1, min(LIMITS.max_holders, int(rate)))
