"""Placement on a trace: the scheduler's choice against round robin and least load, on equal nodes with caches of their own."""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cachepool.trace import BLOCK_TOKENS, Request, generate
from prfaas.scheduler.placement import choose_instance
from prfaas.scheduler.snapshot import InstanceState, RequestFacts
from prfaas.types import AgentName, ClusterName, InstanceId

NUM_NODES = 8
CACHE_BLOCKS = 5_000  # Blocks of a node.
TOKENS_PER_SECOND = 5_500.0  # Prefill rate of a node, which the trace then keeps busy for six seconds in ten.
SEEDS = (1, 2, 3)
NUM_REQUESTS = 23_608
MAX_SHARE = 2.0  # Limit of a node's share, relative to the mean.

Place = Callable[[Sequence["_Node"], Request], "_Node"]


@dataclass
class _Node:
    """One instance that prefills first come, first served, and keeps the longest unused blocks last."""

    number: int
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    ends: list[float] = field(default_factory=list)  # Work of the running requests.
    free_at: float = 0.0
    busy_seconds: float = 0.0

    def held(self, request: Request) -> int:
        """Leading blocks that are here."""
        return sum(1 for _ in itertools.takewhile(self.cached.__contains__, request.blocks))

    def take(self, request: Request) -> tuple[int, float]:
        """Prefill a request: blocks that were here, and the seconds until it was its turn."""
        held = self.held(request)
        waited = max(0.0, self.free_at - request.at_seconds)
        seconds = (request.input_tokens - held * BLOCK_TOKENS) / TOKENS_PER_SECOND
        self.free_at = request.at_seconds + waited + seconds
        heapq.heappush(self.ends, self.free_at)
        self.busy_seconds += seconds
        for block in request.stored:
            self.cached[block] = None
            self.cached.move_to_end(block)
        while len(self.cached) > CACHE_BLOCKS:
            self.cached.popitem(last=False)
        return held, waited

    def under_way(self, now: float) -> int:
        while self.ends and self.ends[0] <= now:
            heapq.heappop(self.ends)
        return len(self.ends)


@dataclass(frozen=True)
class Figures:
    """One policy on one trace."""

    hit_ratio: float  # Share of the prompts' bytes, which grow with their blocks.
    p99_wait_seconds: float
    max_share: float  # Work of the busiest node relative to the mean.


def _by_scheduler() -> Place:
    seeds = itertools.count(1)
    return lambda nodes, request: _chosen(nodes, request, next(seeds))


def _chosen(nodes: Sequence[_Node], request: Request, seed: int) -> _Node:
    names = [(node, InstanceId(str(node.number)), AgentName(str(node.number))) for node in nodes]
    states = [
        InstanceState(name, ClusterName("pd"), "pd", "both", agent, num_requests=node.under_way(request.at_seconds))
        for node, name, agent in names
    ]
    cached = {agent: node.held(request) * BLOCK_TOKENS for node, _, agent in names}
    chosen = choose_instance(states, RequestFacts(request.input_tokens, cached_tokens=cached, seed=seed))
    assert chosen is not None, "every node is healthy"
    return nodes[int(chosen.instance)]


def _by_load(nodes: Sequence[_Node], request: Request) -> _Node:
    return min(nodes, key=lambda node: (node.under_way(request.at_seconds), node.number))


def _in_turn() -> Place:
    numbers = itertools.count()
    return lambda nodes, request: nodes[next(numbers) % len(nodes)]


def replay(trace: Sequence[Request], place: Place) -> Figures:
    """Return every request of the trace, placed as it arrives."""
    nodes = [_Node(number) for number in range(NUM_NODES)]
    waits, num_held = [], 0
    for request in trace:
        held, waited = place(nodes, request).take(request)
        num_held += held
        waits.append(waited)
    busy = [node.busy_seconds for node in nodes]
    return Figures(
        num_held / sum(len(request.blocks) for request in trace),
        statistics.quantiles(waits, n=100)[98],
        max(busy) / statistics.mean(busy),
    )


def measure() -> list[dict[str, Any]]:
    """Return a row for hits, waiting and balance each; ours is compared with the others trace by trace."""
    traces = [generate(seed, NUM_REQUESTS) for seed in SEEDS]
    runs = {
        "prfaas": [replay(trace, _by_scheduler()) for trace in traces],
        "round robin": [replay(trace, _in_turn()) for trace in traces],
        "least load": [replay(trace, _by_load) for trace in traces],
    }
    hits = {name: [run.hit_ratio for run in found] for name, found in runs.items()}
    waits = {name: [run.p99_wait_seconds for run in found] for name, found in runs.items()}
    shares = {name: [run.max_share for run in found] for name, found in runs.items()}
    below = all(own < min(rivals) for own, rivals in _by_trace(waits))
    above = all(own > max(rivals) for own, rivals in _by_trace(hits))
    return [
        _row("placement: hit rate by bytes", hits, "above the others", holds=above),
        _row("placement: p99 of the seconds until a prefill begins", waits, "below the others", holds=below),
        _row(
            "placement: the busiest node's work over the mean",
            shares,
            f"<= {MAX_SHARE:g}",
            holds=max(shares["prfaas"]) <= MAX_SHARE,
        ),
    ]


def _by_trace(figures: dict[str, list[float]]) -> Iterator[tuple[float, list[float]]]:
    rivals = [values for name, values in figures.items() if name != "prfaas"]
    for number, own in enumerate(figures["prfaas"]):
        yield own, [rival[number] for rival in rivals]


def _row(name: str, figures: dict[str, list[float]], bar: str, *, holds: bool) -> dict[str, Any]:
    spreads = {who: _spread(values) for who, values in figures.items()}
    return {"name": name, "figure": spreads.pop("prfaas"), "bar": bar, "holds": holds, "peers": spreads}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}
