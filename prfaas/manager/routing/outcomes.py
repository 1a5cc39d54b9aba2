"""Outcomes of requests as routers report them, and the phases of their time to first token.

The router's times of a remote request are divided by the times that the agents of its transfer report.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from prometheus_client import Counter

from prfaas import metrics
from prfaas.manager.routing.decision_log import RecordedDecision
from prfaas.manager.routing.request_record import OUTCOMES, ROUTES, ReportedRequest, RequestRecord
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.explanation import Phases, clusters_of, router_phases, within
from prfaas.scheduler.route import EXPLANATIONS
from prfaas.types import OutcomeKind, TransferPhase

AWAITED_SECONDS = 5.0  # Routers and agents report each second; later ones report to another manager.
MAX_TRANSFERS = 4096  # Transfers that only one side has reported.
MAX_SECONDS = 86_400.0
_TRANSFER_PHASES: tuple[TransferPhase, ...] = get_args(TransferPhase)


def transfer_phases(decide: float, ttft: float, seconds: dict[TransferPhase, float]) -> Phases:
    """Return the phases of a remote request. They add up to the time to first token: earlier phases take precedence."""
    phases: Phases = {"decide": decide}
    left = ttft - decide
    for phase in _TRANSFER_PHASES:
        phases[phase] = within(seconds[phase], left)
        left -= phases[phase]
    return phases | {"rest": max(0.0, left)}


MAX_OUTCOMES = 1024
WORDS: Mapping[str, str] = dict(EXPLANATIONS.items())
_KINDS: Mapping[str, OutcomeKind] = {kind: kind for kind in OUTCOMES}
MAX_REPORTERS = 1024  # Runs of routers whose last report is remembered.
MAX_FALLBACK_REASONS = 64


@dataclass(frozen=True)
class RequestOutcome:
    """Outcome of one request. `phases` is empty if a leg failed or no token arrived."""

    outcome: OutcomeKind
    fallback: str
    ttft_seconds: float
    phases: Phases
    transfer_id: str = ""  # Hexadecimal, as in the logs of routers, agents and engines.


@dataclass(slots=True)
class _Transfer:
    """Reports on one transfer, in any order."""

    seconds: dict[TransferPhase, float] = field(default_factory=dict)  # As its agents say.
    request: pb.ReportRequestsRequest.Answered | None = None
    outcome: RequestOutcome | None = None
    number: int = 0  # Of the request in the record.
    awaited_until: float = 0.0  # Set with the request and its outcome.


class OutcomeLog:
    """Latest outcomes and their metrics. Reports with unknown routes or reasons are skipped: labels are closed sets."""

    def __init__(self, clock: Callable[[], float], *, wall_clock: Callable[[], float] = time.time) -> None:
        """`clock` is monotonic; `wall_clock` is Unix time."""
        self._clock, self._wall_clock = clock, wall_clock
        self.record = RequestRecord()
        self._by_decision: OrderedDict[bytes, RequestOutcome] = OrderedDict()
        self._transfers: OrderedDict[bytes, _Transfer] = OrderedDict()
        self._reporters: OrderedDict[bytes, int] = OrderedDict()  # Number of the last report of each.
        self._fallback_reasons: set[str] = set()

    def is_repeated(self, reporter: bytes, number: int) -> bool:
        """Return whether this report was taken before. Reports of one reporter arrive in order."""
        if not reporter:
            return False
        is_known = number <= self._reporters.get(reporter, 0)
        self._reporters[reporter] = max(number, self._reporters.get(reporter, 0))
        self._reporters.move_to_end(reporter)
        if len(self._reporters) > MAX_REPORTERS:
            self._reporters.popitem(last=False)
        return is_known

    def note(self, report: pb.ReportRequestsRequest.Answered, decided: RecordedDecision | None = None) -> None:
        """Count a request, and record it with what this manager decided."""
        if report.route not in ROUTES or report.reason not in EXPLANATIONS:
            return
        outcome = _outcome(report)
        metrics.MANAGER_ANSWERED.labels(route=report.route, reason=report.reason, outcome=outcome.outcome).inc()
        if outcome.outcome == "fell_back":
            metrics.MANAGER_FALLBACKS.labels(reason=self._fallback_reason(outcome.fallback)).inc()
        if outcome.ttft_seconds:
            metrics.MANAGER_TTFT.labels(route=report.route).observe(outcome.ttft_seconds)
        if report.decision_id:
            self._by_decision[report.decision_id] = outcome
            if len(self._by_decision) > MAX_OUTCOMES:
                self._by_decision.popitem(last=False)
        number = self.record.add(_reported(report, outcome, decided, at=self._wall_clock()))
        if report.transfer_id and outcome.phases:
            self._await_agents(report, outcome, number)
        else:
            self._count_phases(report, outcome.phases, number)

    def _await_agents(self, report: pb.ReportRequestsRequest.Answered, outcome: RequestOutcome, number: int) -> None:
        transfer = self._transfer(report.transfer_id)
        if transfer.request is None:
            transfer.request, transfer.outcome, transfer.number = report, outcome, number
            transfer.awaited_until = self._clock() + AWAITED_SECONDS
            self._complete_ready(report.transfer_id, transfer)

    def _fallback_reason(self, word: str) -> str:
        """Return a router's word as a label. A caller cannot make any number of labels."""
        if word not in self._fallback_reasons and len(self._fallback_reasons) < MAX_FALLBACK_REASONS:
            self._fallback_reasons.add(word)
        return word if word in self._fallback_reasons else "unknown"

    def _count_phases(self, report: pb.ReportRequestsRequest.Answered, phases: Phases, number: int) -> None:
        self.record.set_phases(number, phases)
        for phase, seconds in phases.items():
            metrics.MANAGER_TTFT_PHASE_SECONDS.labels(route=report.route, phase=phase).inc(seconds)
        if report.decision_id in self._by_decision:
            self._by_decision[report.decision_id] = replace(self._by_decision[report.decision_id], phases=phases)

    def note_timing(self, timing: pb.ReportTransferRequest.Timing) -> None:
        """Record the times of a transfer that one of its agents reports."""
        transfer = self._transfer(timing.transfer_id)
        for phase in _TRANSFER_PHASES:
            seconds = getattr(timing, f"{phase}_seconds")
            if timing.HasField(f"{phase}_seconds") and 0 <= seconds < MAX_SECONDS:
                transfer.seconds[phase] = seconds
        self._complete_ready(timing.transfer_id, transfer)

    def _transfer(self, transfer_id: bytes) -> _Transfer:
        transfer = self._transfers.setdefault(transfer_id, _Transfer())
        if len(self._transfers) > MAX_TRANSFERS:
            self._give_up(self._transfers.popitem(last=False)[1])
        return transfer

    def _complete_ready(self, transfer_id: bytes, transfer: _Transfer) -> None:
        """Count a request with divided phases once its router and both agents have reported."""
        if transfer.request is None or transfer.outcome is None or len(transfer.seconds) < len(_TRANSFER_PHASES):
            return
        del self._transfers[transfer_id]
        outcome = transfer.outcome
        phases = transfer_phases(outcome.phases["decide"], outcome.ttft_seconds, transfer.seconds)
        self._count_phases(transfer.request, phases, transfer.number)

    def expire(self) -> None:
        """Count requests with undivided phases if the agents of their transfer do not report to this manager."""
        now = self._clock()
        for key, transfer in list(self._transfers.items()):
            if transfer.request is not None and transfer.awaited_until <= now:
                self._give_up(self._transfers.pop(key))

    def _give_up(self, transfer: _Transfer) -> None:
        if transfer.request is not None and transfer.outcome is not None:
            self._count_phases(transfer.request, transfer.outcome.phases, transfer.number)

    def get(self, decision_id: bytes) -> RequestOutcome | None:
        return self._by_decision.get(decision_id)


def _reported(
    report: pb.ReportRequestsRequest.Answered, outcome: RequestOutcome, decided: RecordedDecision | None, *, at: float
) -> ReportedRequest:
    reported = ReportedRequest(at, report.route, outcome.outcome, outcome.ttft_seconds)
    if decided is None:
        return reported
    source, destination = clusters_of(decided.snapshot, decided.decision)
    return replace(
        reported,
        model=decided.model,
        tenant=decided.tenant,
        source=source,
        destination=destination,
        num_prompt_tokens=decided.facts.num_prompt_tokens,
    )


def _outcome(report: pb.ReportRequestsRequest.Answered) -> RequestOutcome:
    ttft = report.ttft_seconds if 0 < report.ttft_seconds < MAX_SECONDS else 0.0
    kind = _KINDS.get(report.outcome) or _kind_of_old_report(report, ttft)
    phases: Phases = {}
    if kind == "completed" and ttft:
        times = {"decide_seconds": report.decide_seconds, "prefill_seconds": report.prefill_seconds}
        phases |= router_phases(report.route, ttft, **times)
    return RequestOutcome(kind, report.fallback, ttft, phases, report.transfer_id.hex())


def _kind_of_old_report(report: pb.ReportRequestsRequest.Answered, ttft: float) -> OutcomeKind:
    """Return the outcome of a report without one, which routers of version 0.1.0 send."""
    if not ttft or report.status >= 500:
        return "failed"
    return "fell_back" if report.fallback else "completed"


def counts_by_reason(counter: Counter) -> list[dict[str, Any]]:
    """Return the samples of a counter of requests by route and reason since the start, as /metrics has them."""
    return [
        {**sample.labels, "count": sample.value, "explanation": WORDS[sample.labels["reason"]]}
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    ]
