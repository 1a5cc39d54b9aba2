"""A recorded day in the twin: a fleet that an autoscaler resizes beside the fixed fleet that serves its peak.

The autoscaler asks every `PLAN_SECONDS` for `needed_instances`, as KEDA asks a manager, and knows only the requests that
ended in that time. A smaller fleet must meet the objective in a replay of the last hour. Instances serve `BOOT_SECONDS`
after they are asked for, and cost from then on. They leave when two answers in a row need fewer, and cost until their
last request has ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from benchmarks.twin.figure import Figure
from prfaas.manager.planning.demand import needed_instances
from prfaas.manager.planning.replay import REPLAY_SECONDS, Replay
from prfaas.manager.state.traffic import MAX_REQUESTS
from prfaas.model.capacity.decoding import decode_capacity
from prfaas.model.cost.workload import Workload
from prfaas.model.deployment import Deployment
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import best_plan
from prfaas.sim.builder import threshold_tokens
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.scenario import Scenario
from prfaas.sim.stations import Station, StationTwin
from prfaas.sim.workload.traffic import draw_requests
from prfaas.solve.files import catalog
from prfaas.solve.files.deployment_file import read_deployment
from prfaas.solve.files.traces import find_trace

PLAN_SECONDS = 300.0
BOOT_SECONDS = 300.0
DRAIN_SECONDS = 60.0  # The longest prefill takes 22 s, and an answer 25 s.
TTFT_SECONDS = 12.0  # For 90 % of the requests of each hour.
MEAN_PER_SECOND = 1.5
DEPTH = 0.6  # The peak is 1.6 times the mean.
HOUR = 3600.0
_LONGEST_SECONDS = 600.0  # Requests that arrived earlier have ended.

Sizes = Mapping[str, Mapping[str, int]]
Group = tuple[str, str]  # Cluster and role.


@dataclass(frozen=True)
class ScaledDay:
    """Prices of both fleets for the day, and the P90 of TTFT in each hour of the scaled one, in seconds."""

    scaled_price: float
    fixed_price: float
    ttft_seconds: tuple[float, ...]

    @property
    def saved_ratio(self) -> float:
        return 1 - self.scaled_price / self.fixed_price


class ScalableTwin(StationTwin):
    """Twin whose stations get other numbers of servers during the run. It begins with all stages."""

    def adopt(self, plan: Plan, *, num_remote: int, batch: int) -> None:
        """Change the threshold and the instances; `batch` is the largest of a decode instance."""
        self._threshold = threshold_tokens(plan)
        (split,) = plan.splits
        _resize(self.decode, round(split.num_decode) * batch)
        moved = []
        for station, num_servers in ((self.local, round(split.num_prefill)), (self.remote, num_remote)):
            if station is not None:
                moved += _resize(station, num_servers)
        for request in moved:
            self._send(request)


def _resize(station: Station, num_servers: int) -> list[SimulatedRequest]:
    """Change the number of servers, and return the requests that wait although none is left.

    Servers that leave finish their request first.
    """
    station._idle += num_servers - station.num_servers
    station.num_servers = num_servers
    while station._idle > 0 and station._waiting:
        station._idle -= 1
        station._serve(*station._waiting.popleft())
    left = [] if num_servers else [request for request, _ in station._waiting]
    if left:
        station._waiting.clear()
    return left


class _Fleet:
    """Instances by cluster and role as they are asked for, serve and cost."""

    def __init__(self, deployment: Deployment, workload: Workload, twin: ScalableTwin, sizes: Sizes) -> None:
        self._twin = twin
        self._deployment = deployment
        self._workload = workload
        self._prices = {cluster.name: cluster.price_per_hour or 0.0 for cluster in deployment.clusters}
        self._asked = _flat(sizes)
        self._serving = dict(self._asked)
        self._answers: deque[dict[Group, int]] = deque([dict(self._asked)], maxlen=2)
        self.price = 0.0
        self._adopt()

    def scale(self, sizes: Sizes, *, until: float) -> None:
        """Ask for other sizes, and pay for `PLAN_SECONDS`, or until the end of the day. Unknown sizes change nothing."""
        if sizes:
            self._answers.append(_flat(sizes))
        now = self._twin.timeline.now
        for group, asked in self._asked.items():
            wanted = max(answer[group] for answer in self._answers)
            if wanted < asked:
                self.price += (asked - wanted) * self._prices[group[0]] * DRAIN_SECONDS / HOUR
            self._asked[group] = wanted
            self._serving[group] = min(self._serving[group], wanted)
        self._adopt()
        self._twin.timeline.at(now + BOOT_SECONDS, self._start, dict(self._asked))
        seconds = min(PLAN_SECONDS, until - now)
        self.price += sum(count * self._prices[group[0]] for group, count in self._asked.items()) * seconds / HOUR

    def _start(self, ready: dict[Group, int]) -> None:
        """Let the instances serve that were asked for `BOOT_SECONDS` ago and are still wanted."""
        for group, asked in self._asked.items():
            self._serving[group] = max(self._serving[group], min(asked, ready[group]))
        self._adopt()

    def _adopt(self) -> None:
        (prfaas,), (pd,) = self._deployment.prfaas, self._deployment.pd
        num_remote, num_prefill = self._serving[prfaas.name, "prefill"], self._serving[pd.name, "prefill"]
        num_decode = self._serving[pd.name, "decode"]
        batch = decode_capacity(pd, self._deployment, self._workload).max_batch
        self._twin.adopt(self._plan(num_remote, num_prefill, num_decode), num_remote=num_remote, batch=batch)

    @cache  # noqa: B019 - a fleet lives as long as its run
    def _plan(self, num_remote: int, num_prefill: int, num_decode: int) -> Plan:
        """Return the plan of a manager that sees these instances."""
        (prfaas,), (pd,) = self._deployment.prfaas, self._deployment.pd
        present = replace(
            self._deployment,
            prfaas=(replace(prfaas, num_instances=num_remote),) if num_remote else (),
            pd=(replace(pd, num_instances=num_prefill + num_decode, num_prefill=num_prefill),),
            paths=self._deployment.paths if num_remote else (),
        )
        return best_plan(present, self._workload)


def scaled_day(*, hours: float, seed: int, autoscaled: bool = True) -> ScaledDay:
    """Simulate a day of `hours` on the case study's deployment. Without `autoscaled` the fixed fleet runs."""
    listed, written = read_deployment(catalog.deployment_path(catalog.CASE_STUDY))
    deployment = replace(listed, objectives=replace(listed.objectives, ttft_seconds=TTFT_SECONDS))
    workload = find_trace(written.trace, beside=None)
    end = hours * HOUR
    requests = draw_requests(
        workload,
        f"diurnal:period={end:.0f}s,depth={DEPTH}",
        count=round(MEAN_PER_SECOND * end),
        rate=MEAN_PER_SECOND,
        seed=seed,
    )
    fixed = needed_instances(deployment, workload, MEAN_PER_SECOND * (1 + DEPTH))
    twin = ScalableTwin(deployment, workload, best_plan(deployment, workload), Scenario())
    fleet = _Fleet(deployment, workload, twin, fixed)
    arrivals = [request.arrival for request in requests]

    answer: Sizes = fixed

    @cache
    def needed(arrivals_per_second: float) -> Sizes:
        return needed_instances(deployment, workload, arrivals_per_second)

    def plan_again(now: float) -> None:
        nonlocal answer
        if autoscaled and now >= PLAN_SECONDS:
            asked = needed(round(_ended(requests, arrivals, now) / PLAN_SECONDS, 2))
            seen = requests[: bisect_left(arrivals, now)][bisect_left(arrivals, now - REPLAY_SECONDS) :][-MAX_REQUESTS:]
            answer = Replay(lambda: seen, workload, deployment, asked, answer).run().needed_instances
        fleet.scale(answer, until=end)
        if now + PLAN_SECONDS < end:
            twin.timeline.at(now + PLAN_SECONDS, plan_again, now + PLAN_SECONDS)

    twin.timeline.at(0.0, plan_again, 0.0)
    twin.run(requests)
    prices = {cluster.name: cluster.price_per_hour or 0.0 for cluster in deployment.clusters}
    fixed_price = sum(prices[group[0]] * count for group, count in _flat(fixed).items()) * hours
    return ScaledDay(fleet.price, fixed_price, _by_hour(requests, end, num_parts=24))


def autoscaling() -> Iterator[Figure]:
    """Yield the saving of a whole day, and its worst hour."""
    day = scaled_day(hours=24.0, seed=0)
    saved, worst = round(day.saved_ratio, 3), round(max(day.ttft_seconds), 1)
    yield Figure("autoscaled day: saved of the fixed fleet's price", saved, "at least 0.15", saved >= 0.15)
    bar = f"at most {TTFT_SECONDS:g}"
    yield Figure("autoscaled day: P90 of TTFT in the worst hour, seconds", worst, bar, worst <= TTFT_SECONDS)


def _flat(sizes: Sizes) -> dict[Group, int]:
    return {(cluster, role): count for cluster, counts in sizes.items() for role, count in counts.items()}


def _ended(requests: list[SimulatedRequest], arrivals: list[float], now: float) -> int:
    """Return how many requests ended in the last `PLAN_SECONDS`."""
    first = bisect_left(arrivals, now - PLAN_SECONDS - _LONGEST_SECONDS)
    latest = requests[first : bisect_left(arrivals, now)]
    return sum(now - PLAN_SECONDS < request.decode_end <= now for request in latest)


def _by_hour(requests: list[SimulatedRequest], end: float, *, num_parts: int) -> tuple[float, ...]:
    """Return the P90 of TTFT in each part of the day."""
    parts: list[list[float]] = [[] for _ in range(num_parts)]
    for request in requests:
        parts[min(int(request.arrival / end * num_parts), num_parts - 1)].append(request.ttft)
    return tuple(float(np.quantile(part, 0.9)) for part in parts)
