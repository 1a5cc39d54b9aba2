"""Where the time to the first token of a remote request went: its router's times, divided by what both agents saw."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from prfaas import metrics
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.route import EXPLANATIONS
from prfaas.types import TransferPhase

AWAITED_SECONDS = 5.0  # routers and agents report each second; who has not by then reports to another manager
MAX_TRANSFERS = 4096  # remembered, reported by one side and not yet by the others
MAX_SECONDS = 86_400.0
Phase = Literal["decide", "queue", "prefill", "wire", "load", "rest", "leg", "handover", "engine"]
Phases = dict[Phase, float]
_OF_TRANSFERS: tuple[TransferPhase, ...] = get_args(TransferPhase)


def router_phases(its: pb.ReportRequestsRequest.Answered, ttft: float) -> Phases:
    """What the router alone knows: parts that sum up to the time to the first token."""
    decide = _within(its.decide_seconds, ttft)
    if its.route != "remote":
        return {"decide": decide, "engine": ttft - decide}
    leg = _within(its.prefill_seconds, ttft - decide) if its.prefill_seconds > 0 else ttft - decide
    return {"decide": decide, "leg": leg, "handover": ttft - decide - leg}


def transfer_phases(decide: float, ttft: float, seen: dict[TransferPhase, float]) -> Phases:
    """Parts that sum up to the time to the first token; none is longer than what the earlier ones leave of it."""
    phases: Phases = {"decide": decide}
    left = ttft - decide
    for phase in _OF_TRANSFERS:
        phases[phase] = _within(seen[phase], left)
        left -= phases[phase]
    return phases | {"rest": max(0.0, left)}


def _within(seconds: float, most: float) -> float:
    return min(seconds, most) if seconds > 0 else 0.0


@dataclass
class _Transfer:
    """What has been said of one transfer; `awaited_until` once its request has been answered."""

    seen: dict[TransferPhase, float] = field(default_factory=dict)
    phases: Phases | None = None
    ttft: float = 0.0
    settled: Callable[[Phases], None] = lambda phases: None
    awaited_until: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.phases is not None and len(self.seen) == len(_OF_TRANSFERS)


class PhaseCollector:
    """Brings together what routers and agents say of one transfer, in whatever order they say it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transfers: OrderedDict[bytes, _Transfer] = OrderedDict()

    def answered(self, transfer_id: bytes, phases: Phases, ttft: float, settled: Callable[[Phases], None]) -> None:
        """A request was answered; `settled` hears its phases once, divided as soon as both agents have spoken."""
        its = self._transfer(transfer_id)
        if its.phases is not None:
            return
        its.phases, its.ttft, its.settled = phases, ttft, settled
        its.awaited_until = self._clock() + AWAITED_SECONDS
        self._settle(transfer_id, its)

    def timed(self, timing: pb.ReportTransferRequest.Timing) -> None:
        """One of a transfer's agents has spoken."""
        its = self._transfer(timing.transfer_id)
        for phase in _OF_TRANSFERS:
            seconds = getattr(timing, f"{phase}_seconds")
            if timing.HasField(f"{phase}_seconds") and 0 <= seconds < MAX_SECONDS:
                its.seen[phase] = seconds
        self._settle(timing.transfer_id, its)

    def _settle(self, transfer_id: bytes, its: _Transfer) -> None:
        if its.is_whole and its.phases is not None:
            del self._transfers[transfer_id]
            its.settled(transfer_phases(its.phases["decide"], its.ttft, its.seen))

    def expire(self) -> None:
        """Settle undivided what waits for agents that do not report here."""
        now = self._clock()
        late = [key for key, its in self._transfers.items() if its.phases is not None and its.awaited_until <= now]
        for key in late:
            self._give_up(self._transfers.pop(key))

    def _transfer(self, transfer_id: bytes) -> _Transfer:
        its = self._transfers.setdefault(transfer_id, _Transfer())
        if len(self._transfers) > MAX_TRANSFERS:
            self._give_up(self._transfers.popitem(last=False)[1])
        return its

    def _give_up(self, its: _Transfer) -> None:
        if its.phases is not None:
            its.settled(its.phases)


MAX_ANSWERED = 1024
ROUTES = frozenset({"local", "remote", "refused"})
WORDS: Mapping[str, str] = dict(EXPLANATIONS.items())
OutcomeKind = Literal["answered", "fell_back", "failed"]


@dataclass(frozen=True)
class RequestOutcome:
    """One request. `phases` are empty where a leg failed, or no token came."""

    outcome: OutcomeKind
    fallback: str
    ttft_seconds: float
    phases: Phases


class OutcomeLog:
    """Counts what routers report. Words that no scheduler has said are left out: a label is a closed set."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._by_decision: OrderedDict[bytes, RequestOutcome] = OrderedDict()
        self._division = PhaseCollector(clock)

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

    def get(self, decision_id: bytes) -> RequestOutcome | None:
        return self._by_decision.get(decision_id)


def _ended(its: pb.ReportRequestsRequest.Answered) -> RequestOutcome:
    ttft = its.ttft_seconds if 0 < its.ttft_seconds < MAX_SECONDS else 0.0
    outcome: OutcomeKind = "failed" if not ttft or its.status >= 500 else "fell_back" if its.fallback else "answered"
    return RequestOutcome(outcome, its.fallback, ttft, router_phases(its, ttft) if outcome == "answered" else {})


def outcome_counts() -> Iterator[dict[str, Any]]:
    """Requests since the start, by route, reason and outcome, as /metrics counts them."""
    for metric in metrics.MANAGER_ANSWERED.collect():
        yield from (
            {**sample.labels, "count": sample.value, "explanation": WORDS[sample.labels["reason"]]}
            for sample in metric.samples
            if sample.name.endswith("_total")
        )


def ttft_totals() -> dict[str, dict[str, float]]:
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
