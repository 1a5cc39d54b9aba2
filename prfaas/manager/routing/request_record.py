"""Bounded record of reported requests, with exact percentiles over any part of the last hour."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from prfaas.types import OutcomeKind

MAX_REQUESTS = 1 << 17  # An hour at 36 requests per second, in 10 MB.
MAX_NAMES = 4096  # Models, tenants and clusters; later ones count as unnamed.
ROUTES = ("remote", "local", "refused")
OUTCOMES: tuple[OutcomeKind, ...] = get_args(OutcomeKind)
PHASES = ("decide", "queue", "prefill", "wire", "load", "rest", "leg", "handover", "engine")
PERCENTILES = (0.5, 0.95, 0.99)
_ROW = np.dtype(
    [
        ("at", "f8"),
        ("ttft", "f8"),
        ("route", "u1"),
        ("outcome", "u1"),
        ("model", "u2"),
        ("tenant", "u2"),
        ("source", "u2"),
        ("destination", "u2"),
        ("prompt_tokens", "u4"),
        ("phases", "f4", (len(PHASES),)),
    ]
)
Rows = NDArray[Any]


@dataclass(frozen=True)
class ReportedRequest:
    """A request as its router reports it. Names are empty and tokens 0 where the router decided by itself."""

    at: float  # Unix time of the report.
    route: str
    outcome: OutcomeKind
    ttft_seconds: float  # 0 without a first token.
    model: str = ""
    tenant: str = ""
    source: str = ""  # Cluster that prefilled.
    destination: str = ""  # Cluster that decoded.
    num_prompt_tokens: int = 0


class RequestRecord:
    """The last `MAX_REQUESTS` reported requests."""

    def __init__(self) -> None:
        self._rows: Rows = np.zeros(MAX_REQUESTS, _ROW)
        self._num_added = 0
        self._numbers = {"": 0}  # Number of each name.

    def add(self, request: ReportedRequest) -> int:
        """Add a request, and return its number for `set_phases`."""
        row = self._rows[self._num_added % MAX_REQUESTS]
        row["at"], row["ttft"] = request.at, request.ttft_seconds
        row["route"], row["outcome"] = ROUTES.index(request.route), OUTCOMES.index(request.outcome)
        for field in ("model", "tenant", "source", "destination"):
            row[field] = self._number(getattr(request, field))
        row["prompt_tokens"], row["phases"] = request.num_prompt_tokens, 0.0
        self._num_added += 1
        return self._num_added - 1

    def _number(self, name: str) -> int:
        if name not in self._numbers and len(self._numbers) < MAX_NAMES:
            self._numbers[name] = len(self._numbers)
        return self._numbers.get(name, 0)

    def set_phases(self, number: int, phases: Mapping[Any, float]) -> None:
        """Set the seconds of a request's phases, unless newer requests have taken its place."""
        if number >= self._num_added - MAX_REQUESTS:
            self._rows[number % MAX_REQUESTS]["phases"] = [phases.get(phase, 0.0) for phase in PHASES]

    def figures(self, since: float, until: float, *, num_steps: int, filters: Mapping[str, str]) -> dict[str, Any]:
        """Return figures of the requests reported between two times, as a whole and in `num_steps` equal parts.

        `filters` maps `model`, `tenant` and `cluster` to the name that requests must have.
        """
        kept = self._rows[: min(self._num_added, MAX_REQUESTS)]
        within = kept[(kept["at"] >= since) & (kept["at"] < until)]
        rows = within[self._passes(within, filters)]
        step = (until - since) / num_steps
        places = np.minimum(((rows["at"] - since) / step).astype(int), num_steps - 1)
        is_full = self._num_added > MAX_REQUESTS
        return {
            "complete_since": max(since, float(kept["at"].min())) if is_full else since,
            "num_requests": len(rows),
            "num_hidden": len(within) - len(rows),
            "num_counted": int(np.count_nonzero(rows["prompt_tokens"])),
            "prompt_tokens": int(rows["prompt_tokens"].sum()),
            "outcomes": dict(
                zip(OUTCOMES, np.bincount(rows["outcome"], minlength=len(OUTCOMES)).tolist(), strict=True)
            ),
            "ttft": {route: _first_tokens(rows[rows["route"] == number]) for number, route in enumerate(ROUTES[:2])},
            "choices": self._choices(within),
            "steps": {
                "requests": _per_step(places, num_steps),
                "prompt_tokens": _per_step(places, num_steps, rows["prompt_tokens"]),
                "remote": _per_step(places[rows["route"] == 0], num_steps),
                "ttft": {
                    route: _percentiles_per_step(rows, places, number, num_steps)
                    for number, route in enumerate(ROUTES[:2])
                },
            },
        }

    def _passes(self, rows: Rows, filters: Mapping[str, str]) -> NDArray[np.bool_]:
        passes = np.ones(len(rows), bool)
        for field in ("model", "tenant"):
            if filters.get(field):
                passes &= rows[field] == self._numbers.get(filters[field], -1)
        if filters.get("cluster"):
            cluster = self._numbers.get(filters["cluster"], -1)
            passes &= (rows["source"] == cluster) | (rows["destination"] == cluster)
        return passes

    def _choices(self, rows: Rows) -> dict[str, list[str]]:
        """Return the names that filters can choose."""
        names = list(self._numbers)
        columns = {"model": ("model",), "tenant": ("tenant",), "cluster": ("source", "destination")}
        return {
            field: sorted({names[number] for part in parts for number in np.unique(rows[part])} - {""})
            for field, parts in columns.items()
        }


def percentile(ordered: NDArray[np.float64], share: float) -> float | None:
    """Return the nearest-rank percentile, which is a value of the sample; None without values."""
    return float(ordered[math.ceil(share * len(ordered)) - 1]) if len(ordered) else None


def _first_tokens(rows: Rows) -> dict[str, Any]:
    """Return percentiles of TTFT, and mean seconds by phase of the requests whose phases are known."""
    ordered = np.sort(rows["ttft"][rows["ttft"] > 0])
    divided = rows["phases"][rows["phases"].any(axis=1)]
    means = divided.mean(axis=0) if len(divided) else np.zeros(len(PHASES))
    return {
        "count": len(ordered),
        "percentiles": [percentile(ordered, share) for share in PERCENTILES],
        "num_divided": len(divided),
        "phases": {phase: float(mean) for phase, mean in zip(PHASES, means, strict=True) if mean},
    }


def _per_step(places: Rows, num_steps: int, weights: Rows | None = None) -> list[float]:
    found: list[float] = np.bincount(places, weights, minlength=num_steps).tolist()
    return found


def _percentiles_per_step(rows: Rows, places: Rows, route: int, num_steps: int) -> list[list[float | None]]:
    """Return P50 and P95 of each step."""
    chosen = (rows["route"] == route) & (rows["ttft"] > 0)
    order = np.lexsort((rows["ttft"][chosen], places[chosen]))
    parts = np.split(rows["ttft"][chosen][order], np.searchsorted(places[chosen][order], np.arange(1, num_steps)))
    return [[percentile(part, share) for part in parts] for share in PERCENTILES[:2]]
