"""How requests were answered, as routers report it: counted, and the latest by their decision."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from prfaas import metrics
from prfaas.manager.phases import MAX_SECONDS, Division, Phases, undivided
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.route import EXPLANATIONS

MAX_ANSWERED = 1024
ROUTES = frozenset({"local", "remote", "refused"})
WORDS: Mapping[str, str] = dict(EXPLANATIONS.items())
Outcome = Literal["answered", "fell_back", "failed"]


@dataclass(frozen=True)
class Ended:
    """One request. `phases` are empty where a leg failed, or no token came."""

    outcome: Outcome
    fallback: str
    ttft_seconds: float
    phases: Phases


class Answered:
    """Counts what routers report. Words that no scheduler has said are left out: a label is a closed set."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._by_decision: OrderedDict[bytes, Ended] = OrderedDict()
        self._division = Division(clock)

    def note(self, its: pb.ReportRequestsRequest.Answered) -> None:
        if its.route not in ROUTES or its.reason not in EXPLANATIONS:
            return
        ended = _ended(its)
        metrics.MANAGER_ANSWERED.labels(route=its.route, reason=its.reason, outcome=ended.outcome).inc()
        if ended.ttft_seconds:
            metrics.MANAGER_TTFT.labels(route=its.route).observe(ended.ttft_seconds)
        if its.decision_id:
            self._by_decision[its.decision_id] = ended
            if len(self._by_decision) > MAX_ANSWERED:
                self._by_decision.popitem(last=False)
        settled = partial(self._settled, its.route, its.decision_id)
        if its.transfer_id and ended.phases:
            self._division.answered(its.transfer_id, ended.phases, ended.ttft_seconds, settled)
        else:
            settled(ended.phases)

    def _settled(self, route: str, decision_id: bytes, phases: Phases) -> None:
        for phase, seconds in phases.items():
            metrics.MANAGER_TTFT_PHASE_SECONDS.labels(route=route, phase=phase).inc(seconds)
        if decision_id in self._by_decision:
            self._by_decision[decision_id] = replace(self._by_decision[decision_id], phases=phases)

    def note_timing(self, timing: pb.ReportTransferRequest.Timing) -> None:
        """An agent has seen a transfer end."""
        self._division.timed(timing)

    def expire(self) -> None:
        """Count what nobody will say more of."""
        self._division.expire()

    def get(self, decision_id: bytes) -> Ended | None:
        return self._by_decision.get(decision_id)


def _ended(its: pb.ReportRequestsRequest.Answered) -> Ended:
    ttft = its.ttft_seconds if 0 < its.ttft_seconds < MAX_SECONDS else 0.0
    outcome: Outcome = "failed" if not ttft or its.status >= 500 else "fell_back" if its.fallback else "answered"
    return Ended(outcome, its.fallback, ttft, undivided(its, ttft) if outcome == "answered" else {})


def counts() -> Iterator[dict[str, Any]]:
    """Requests since the start, by route, reason and outcome, as /metrics counts them."""
    for metric in metrics.MANAGER_ANSWERED.collect():
        yield from (
            {**its.labels, "count": its.value, "explanation": WORDS[its.labels["reason"]]}
            for its in metric.samples
            if its.name.endswith("_total")
        )


def times() -> dict[str, dict[str, float]]:
    """By route: `count` of first tokens, `sum` of their seconds, and the seconds of each phase."""
    found: dict[str, dict[str, float]] = {}
    for metric in metrics.MANAGER_TTFT.collect():
        for its in metric.samples:
            if its.name.endswith(("_count", "_sum")):
                found.setdefault(its.labels["route"], {})[its.name.rpartition("_")[2]] = its.value
    for metric in metrics.MANAGER_TTFT_PHASE_SECONDS.collect():
        for its in metric.samples:
            if its.name.endswith("_total"):
                found.setdefault(its.labels["route"], {})[its.labels["phase"]] = its.value
    return found
