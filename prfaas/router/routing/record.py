"""Record of one request: its log line, its metrics, its report to the manager, and `/debug/decision/<id>`."""

import re
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prfaas import logs, metrics
from prfaas.router.engines.legs import LegFailed
from prfaas.router.routing.plan import RoutePlan
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.explanation import Phases, describe, router_phases
from prfaas.scheduler.route import explain
from prfaas.transfer_report import ReceivedReport, fallback_params
from prfaas.types import LegReason, OutcomeKind

MAX_RECORDS = 1024
SUCCESSES = ("completed", "held")  # Outcomes of a transfer after which the decode engine computed nothing twice.
CLIENT_GONE = 499  # Status of a request whose client has disconnected, as nginx logs it.
_COUNT = re.compile(rb'"(prompt|completion)_tokens":\s*(\d+)')  # Only the usage has this form: texts escape quotes.
_COUNT_BYTES = 64  # End of a chunk in which a count may have begun.
_EVENT = b"data: {"  # Start of each event of a stream but the last.
_log = logs.get("router")


class FailedLeg(NamedTuple):
    """Leg that failed before a first byte. Unlike the exception, it keeps neither bodies nor tokens alive."""

    reason: LegReason
    message: str


def outcome_of_status(status: int) -> OutcomeKind:
    """Return the outcome of a request that no instance had to repeat."""
    if status >= 500:
        return "failed"
    return "refused" if status >= 400 else "completed"


@dataclass
class RequestRecord:
    """One request, from its arrival to the end of its answer. It holds words and numbers, never a body or tokens.

    Attributes:
        path: Path of a forwarded request, which needs no decision.
        client: Client of the request, once admitted.
        estimated_prompt_tokens: Estimated length of the prompt, for an answer without usage.
        plan: Last plan made for the request.
        failures: Legs that failed before a first byte.
        is_broken: The answer broke off after its first byte.
        transfer: The decode engine's report on the transfer.
        decide_seconds: Time until the legs were sent.
        prefill_seconds: Time from then until the prefill leg was answered.
        at: Arrival in seconds since 1970.
        seconds: Total time.
    """

    request_id: str
    path: str = ""
    client: str = ""
    estimated_prompt_tokens: int = 0
    plan: RoutePlan | None = None
    failures: list[FailedLeg] = field(default_factory=list)
    status: int = 0
    is_broken: bool = False
    transfer: ReceivedReport | None = None
    ttft_seconds: float | None = None
    decide_seconds: float | None = None
    prefill_seconds: float | None = None
    at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    _first_at: float = 0.0
    _last_at: float = 0.0
    _tail: bytes = b""
    _counts: dict[bytes, int] = field(default_factory=dict)
    _num_events: int = 0

    @property
    def fallback(self) -> str | None:
        """Return why the decode instance prefilled a remote request: a failed leg or transfer. None without a fallback."""
        if self.plan is None or self.plan.decision.route != "remote":
            return None
        if self.plan.fell_back:
            return self.failures[-1].reason if self.failures else None
        return self.transfer.outcome if self.transfer and self.transfer.outcome not in SUCCESSES else None

    def fallback_params(self) -> dict[str, Any]:
        """Return the parameters by which the decode engine records why the transfer was given up; none without one."""
        if self.plan is None or not self.plan.fell_back or self.plan.transfer_id is None or not self.failures:
            return {}
        return fallback_params(self.plan.transfer_id, self.failures[-1].reason)

    def note_plan(self, plan: RoutePlan) -> None:
        """Record the route, for the first time or after a failure."""
        self.plan = plan
        if self.decide_seconds is None:
            self.decide_seconds = time.monotonic() - self.started

    def note_prefilled(self) -> None:
        """Record the answer of the prefill leg."""
        if self.prefill_seconds is None and self.ttft_seconds is None and self.decide_seconds is not None:
            self.prefill_seconds = time.monotonic() - self.started - self.decide_seconds

    def note_failure(self, failure: LegFailed) -> None:
        self.failures.append(FailedLeg(failure.reason, str(failure)))
        metrics.LEG_FAILURES.labels(reason=failure.reason).inc()

    def note_transfer(self, report: ReceivedReport) -> None:
        """Record the decode engine's report. One on the transfer of an earlier leg says nothing of this answer."""
        if self.plan and self.plan.transfer_id and report.transfer_id == self.plan.transfer_id.hex():
            self.transfer = report

    def note_answer(self, status: int) -> None:
        """Record the first bytes of an answer."""
        self.status = status
        self.ttft_seconds = time.monotonic() - self.started

    def note_chunk(self, chunk: bytes) -> None:
        """Record a chunk of the answer that went to the client."""
        self._num_events += chunk.count(_EVENT)
        self._last_at = time.monotonic()
        self._first_at = self._first_at or self._last_at
        text = self._tail + chunk
        self._counts |= {name: int(number) for name, number in _COUNT.findall(text)}
        self._tail = text[-_COUNT_BYTES:]

    def end(self) -> None:
        """Record the end of the answer."""
        self.seconds = time.monotonic() - self.started

    @property
    def outcome(self) -> OutcomeKind:
        """Return the outcome of the request. One without any status was left by its client."""
        if self.status in (0, CLIENT_GONE):
            return "cancelled"
        if self.is_broken:
            return "broken"
        outcome = outcome_of_status(self.status)
        return "fell_back" if outcome == "completed" and self.fallback else outcome

    @property
    def _route(self) -> str:
        if self.path:
            return "forwarded"
        return self.plan.decision.route if self.plan else "none"

    @property
    def is_streamed(self) -> bool:
        """Return whether the answer came in several chunks."""
        return self._last_at > self._first_at

    @property
    def tpot_seconds(self) -> float:
        """Return the mean time between the tokens of a streamed answer; 0 if it does not state their number."""
        num_tokens = self._counts.get(b"completion", 0)
        return (self._last_at - self._first_at) / (num_tokens - 1) if num_tokens > 1 else 0.0

    @property
    def num_tokens(self) -> int:
        """Return the tokens of prompt and answer; 0 without an answer.

        The answer's usage counts. Without one, the prompt is as counted or estimated, and each event is one token.
        """
        if self.ttft_seconds is None:
            return 0
        is_counted = self.plan is not None and self.plan.facts.counted
        prompt = self.plan.facts.num_prompt_tokens if self.plan and is_counted else self.estimated_prompt_tokens
        return self._counts.get(b"prompt", prompt) + self._counts.get(b"completion", self._num_events)

    def headers(self) -> dict[str, str]:
        """Return the response headers that state the route."""
        headers = {"x-request-id": self.request_id}
        if self.plan is None:
            return headers
        headers["x-prfaas-route"] = self.plan.decision.route
        headers["x-prfaas-reason"] = self.plan.decision.reason
        headers["x-prfaas-cached-tokens"] = str(self.plan.facts.num_cached_tokens)
        if self.plan.transfer_id is not None:
            headers["x-prfaas-transfer"] = self.plan.transfer_id.hex()
        if self.fallback is not None:
            headers["x-prfaas-fallback"] = self.fallback
        return headers

    def summary(self) -> dict[str, Any]:
        """Return the fields of the log line."""
        fields: dict[str, Any] = {"request_id": self.request_id}
        if self.path:
            return fields | {"path": self.path, "status": self.status, "outcome": self.outcome}
        if self.plan is not None:
            fields |= self.plan.summary()
        return fields | {
            "fallback": self.fallback,
            "failures": [failure.reason for failure in self.failures],
            "transfer": self.transfer.outcome if self.transfer else None,
            "transferred_tokens": self.transfer.num_tokens if self.transfer else 0,
            "status": self.status,
            "outcome": self.outcome,
            "ttft_seconds": self.ttft_seconds,
            "tpot_seconds": self.tpot_seconds,
        }

    def publish(self) -> None:
        """Count the request, and write its log line."""
        status = str(self.status or CLIENT_GONE)
        metrics.REQUESTS.labels(status=status, route=self._route, outcome=self.outcome).inc()
        if self.client:
            metrics.CLIENT_TOKENS.labels(client=self.client).inc(self.num_tokens)
        if self.plan is not None:
            decision = self.plan.decision
            metrics.DECISIONS.labels(route=decision.route, reason=decision.reason).inc()
            if self.ttft_seconds is not None:
                metrics.TTFT_SECONDS.labels(route=decision.route).observe(self.ttft_seconds)
            if self.fallback is not None:
                metrics.FALLBACKS.labels(reason=self.fallback).inc()
        _log.info("request.complete", seconds=round(self.seconds, 6), **self.summary())

    def manager_report(self) -> pb.ReportRequestsRequest.Answered | None:
        """Return the report for the manager; None for a request without a decision."""
        if self.plan is None:
            return None
        return pb.ReportRequestsRequest.Answered(
            decision_id=bytes.fromhex(self.plan.decision_id),
            route=self.plan.decision.route,
            reason=self.plan.decision.reason,
            status=self.status,
            fallback=self.fallback or (self.failures[-1].reason if self.failures else ""),
            ttft_seconds=self.ttft_seconds or 0.0,
            decide_seconds=self.decide_seconds or 0.0,
            prefill_seconds=self.prefill_seconds or 0.0,
            transfer_id=self.plan.transfer_id or b"",
            tpot_seconds=self.tpot_seconds,
            streamed=self.is_streamed,
            outcome=self.outcome,
        )

    def explanation(self) -> dict[str, Any]:
        """Return the whole record: in words, and as the data from which `scheduler.route` makes the same decision."""
        fields = self.summary() | {"client": self.client, "at": self.at}
        if self.plan is None:
            was_forwarded = self.path and (self.ttft_seconds is not None or not self.status)
            words = "it needs no decision" if was_forwarded else "it was refused before a decision"
            return fields | {"explanation": words}
        is_own = self.plan.decided_by == "router"  # A manager has the rest on its own page.
        return fields | {
            "explanation": self._words(self.plan),
            "failures": [f"{failure.reason}: {failure.message}" for failure in self.failures],
            "snapshot": self.plan.snapshot.to_dict() if is_own else None,
            "facts": self.plan.facts.to_dict(),
            "phases": self._phases(self.plan.decision.route),
            **(describe(self.plan.snapshot, self.plan.facts, self.plan.decision) if is_own else {}),
        }

    def _phases(self, route: str) -> Phases:
        """Return the phases of the time to first token; none if the answer was not as decided."""
        if self.ttft_seconds is None or self.outcome != "completed":
            return {}
        decide, prefill = self.decide_seconds or 0.0, self.prefill_seconds or 0.0
        return router_phases(route, self.ttft_seconds, decide_seconds=decide, prefill_seconds=prefill)

    def _words(self, plan: RoutePlan) -> str:
        words = [f"{plan.decision.route}: {explain(plan.decision, plan.facts)}"]
        if plan.is_alone:
            words.append("no manager answered in time, so the router decided without cache knowledge")
        if plan.facts.obstacle is not None:
            words.append(f"obstacle: {plan.facts.obstacle}")
        if self.failures:
            words.append("failed before a first byte: " + ", ".join(failure.reason for failure in self.failures))
        if self.fallback:
            words.append("so the decode instance computed the whole prompt")
        return "; ".join(words)


class RequestRecords:
    """Last `MAX_RECORDS` requests. Clients choose request ids, so each client has its own."""

    def __init__(self) -> None:
        self._records: OrderedDict[tuple[str, str], RequestRecord] = OrderedDict()  # By client and request id.

    def add(self, record: RequestRecord) -> None:
        self._records.pop((record.client, record.request_id), None)
        self._records[record.client, record.request_id] = record
        if len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)

    def of(self, request_id: str) -> list[RequestRecord]:
        """Return the requests with this id, at most one of each client, newest first."""
        return [record for (_, name), record in reversed(self._records.items()) if name == request_id]
