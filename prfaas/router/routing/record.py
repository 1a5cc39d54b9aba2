"""What is remembered of a request: its log line, its metrics, and `/debug/decision/<id>`."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from prfaas import logs, metrics
from prfaas.router.engines.legs import LegFailed
from prfaas.router.routing.decide import RoutePlan
from prfaas.scheduler.route import explain

MAX_RECORDS = 1024
_COUNT = re.compile(rb'"(prompt|completion)_tokens":\s*(\d+)')  # in an answer's usage; in its texts quotes are escaped
_COUNT_BYTES = 64  # of an answer's end, in which a count may have begun
_EVENT = b"data: {"  # begins each event of a stream but its last
_log = logs.get("router")


@dataclass
class RequestRecord:
    """One request. `plan` is the last one made for it; `failures` are the legs that failed before a first byte."""

    request_id: str
    path: str = ""  # of one that needs no decision and is passed on
    client: str = ""  # whose request it is, once he is let in
    plan: RoutePlan | None = None
    failures: list[LegFailed] = field(default_factory=list)
    status: int = 0
    ttft_seconds: float | None = None
    decide_seconds: float | None = None  # until the legs were sent
    prefill_seconds: float | None = None  # from then until the prefill leg was answered
    at: float = field(default_factory=time.time)  # seconds since 1970, when it came
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0  # until it ended
    _first_at: float = 0.0
    _last_at: float = 0.0
    _end: bytes = b""  # the last bytes of an answer
    _counts: dict[bytes, int] = field(default_factory=dict)  # of tokens, as the answer said last
    _num_events: int = 0

    @property
    def fallback(self) -> str | None:
        """Why a remote request was answered locally after all."""
        return self.failures[-1].reason if self.failures and self.plan and self.plan.fell_back else None

    def answered(self, status: int) -> None:
        """The first bytes of an answer are there."""
        self.status = status
        self.ttft_seconds = time.monotonic() - self.started

    def streamed(self, chunk: bytes) -> None:
        """One piece of an answer was passed on."""
        self._num_events += chunk.count(_EVENT)
        self._last_at = time.monotonic()
        self._first_at = self._first_at or self._last_at
        text = self._end + chunk
        self._counts |= {name: int(number) for name, number in _COUNT.findall(text)}
        self._end = text[-_COUNT_BYTES:]

    @property
    def is_streamed(self) -> bool:
        """Return whether the answer came in several pieces."""
        return self._last_at > self._first_at

    @property
    def tpot_seconds(self) -> float:
        """Between the tokens of a streamed answer on average; 0 where it does not say how many there were."""
        num_tokens = self._counts.get(b"completion", 0)
        return (self._last_at - self._first_at) / (num_tokens - 1) if num_tokens > 1 else 0.0

    def num_tokens(self, estimated_prompt_tokens: int) -> int:
        """Of prompt and answer: as the answer's usage says, else as counted for the route or estimated, and one an event.

        0 where nothing was answered.
        """
        if self.ttft_seconds is None:
            return 0
        counted = (
            self.plan.facts.num_prompt_tokens if self.plan and self.plan.facts.counted else estimated_prompt_tokens
        )
        return self._counts.get(b"prompt", counted) + self._counts.get(b"completion", self._num_events)

    def decided(self, plan: RoutePlan) -> None:
        """The route is known, for the first time or after a failure."""
        self.plan = plan
        if self.decide_seconds is None:
            self.decide_seconds = time.monotonic() - self.started

    def prefilled(self) -> None:
        """The prefill leg of a remote route has answered."""
        if self.prefill_seconds is None and self.ttft_seconds is None and self.decide_seconds is not None:
            self.prefill_seconds = time.monotonic() - self.started - self.decide_seconds

    def failed(self, failure: LegFailed) -> None:
        self.failures.append(failure)
        metrics.LEG_FAILURES.labels(reason=failure.reason).inc()

    def headers(self) -> dict[str, str]:
        """What the client learns of its route."""
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
        """Return the fields of its log line."""
        fields: dict[str, Any] = {"request_id": self.request_id}
        if self.path:
            return fields | {"path": self.path, "status": self.status}
        if self.plan is not None:
            fields |= self.plan.summary()
        return fields | {
            "fallback": self.fallback,
            "failures": [failure.reason for failure in self.failures],
            "status": self.status,
            "ttft_seconds": self.ttft_seconds,
            "tpot_seconds": self.tpot_seconds,
        }

    def attributes(self) -> dict[str, str | int | float | bool | None]:
        """What its span says of it."""
        said = (
            "route",
            "reason",
            "decided_by",
            "num_prompt_tokens",
            "transfer_id",
            "fallback",
            "status",
            "ttft_seconds",
        )
        summary = self.summary()
        return {name: summary.get(name) for name in said}

    def ended(self) -> None:
        """The last byte of its answer is known."""
        self.seconds = time.monotonic() - self.started

    def tell(self) -> None:
        """Count it, and write its one line."""
        if self.path:
            metrics.PASSED_ON.labels(status=str(self.status)).inc()
        if self.plan is not None:
            decision = self.plan.decision
            metrics.REQUESTS.labels(route=decision.route, reason=decision.reason).inc()
            if self.ttft_seconds is not None:
                metrics.TTFT_SECONDS.labels(route=decision.route).observe(self.ttft_seconds)
            if self.fallback is not None:
                metrics.FALLBACKS.labels(reason=self.fallback).inc()
        _log.info("request.complete", seconds=round(self.seconds, 6), **self.summary())

    def explanation(self) -> dict[str, Any]:
        """Everything: in words, and as the data from which `scheduler.route` makes the same decision again."""
        said = self.summary() | {"client": self.client, "at": self.at}
        if self.plan is None:
            was_passed = self.path and (self.ttft_seconds is not None or not self.status)
            return said | {"explanation": "it needs no decision" if was_passed else "it was refused before a decision"}
        return said | {
            "explanation": self._words(self.plan),
            "failures": [f"{failure.reason}: {failure}" for failure in self.failures],
            "snapshot": self.plan.snapshot.to_dict() if self.plan.decided_by == "router" else None,
            "facts": self.plan.facts.to_dict(),
        }

    def _words(self, plan: RoutePlan) -> str:
        words = [f"{plan.decision.route}: {explain(plan.decision, plan.facts)}"]
        if plan.is_alone:
            words.append("no manager answered in time, so the router decided without knowing what is cached")
        if plan.facts.obstacle is not None:
            words.append(f"what stands in the way: {plan.facts.obstacle}")
        if self.failures:
            words.append("failed before a first byte: " + ", ".join(failure.reason for failure in self.failures))
        if self.fallback:
            words.append("so the decode instance computed all of it")
        return "; ".join(words)


class RequestRecords:
    """The last `MAX_RECORDS` requests. Clients choose ids: one of another client's takes nobody's place."""

    def __init__(self) -> None:
        self._by_client: OrderedDict[tuple[str, str], RequestRecord] = OrderedDict()  # and id

    def add(self, record: RequestRecord) -> None:
        self._by_client.pop((record.client, record.request_id), None)
        self._by_client[record.client, record.request_id] = record
        if len(self._by_client) > MAX_RECORDS:
            self._by_client.popitem(last=False)

    def of(self, request_id: str) -> list[RequestRecord]:
        """Return the requests of this id, one of each client that used it, newest first."""
        return [its for (_, name), its in reversed(self._by_client.items()) if name == request_id]
