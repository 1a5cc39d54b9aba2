"""PPD: whether a later turn is prefilled by the decode node that holds its KV, or by a PD-P instance.

Two modes. `paper` is Algorithm 1 of the PPD paper (arXiv 2603.13358): turn 1 goes P→D, later turns follow the table.
`authors` is what its authors' public engine does: a turn of few new tokens stays whatever the table says, a row whose
measurement of P→D failed stays, and so does a missing one. Both read the table through the same discretisation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

ContextClass = Literal["small", "large"]
WorkloadType = Literal[
    "tiny",
    "short_gen",
    "long_gen",
    "very_long_gen",
    "small_bal",
    "mid_bal",
    "mid_paste",
    "big_paste",
    "huge_paste",
]
PpdMode = Literal["paper", "authors"]
BYPASS_TOKENS = 512  # of `authors`: fewer new tokens than this are prefilled by the decode node
DEFAULT_OUTPUT_TOKENS = 128  # when the request names no limit
SMALL_CONTEXT_TOKENS = 512

# Class limits: the first entry whose limit is not exceeded.
_SHORT_INPUT: Sequence[tuple[float, WorkloadType]] = (  # ratio < 0.25, by output tokens
    (64, "tiny"),
    (256, "short_gen"),
    (512, "long_gen"),
    (float("inf"), "very_long_gen"),
)
_BALANCED: Sequence[tuple[float, WorkloadType]] = ((64, "small_bal"), (float("inf"), "mid_bal"))  # ratio ≤ 2, by input
_LONG_INPUT: Sequence[tuple[float, WorkloadType]] = (  # by input tokens
    (256, "mid_paste"),
    (512, "big_paste"),
    (float("inf"), "huge_paste"),
)


def context_class(num_cached_tokens: int) -> ContextClass:
    """Return the class of what the decode node holds; the measured table ends at `large`, which stands for all above it."""
    return "small" if num_cached_tokens <= SMALL_CONTEXT_TOKENS else "large"


def workload_type(num_input_tokens: int, num_output_tokens: int) -> WorkloadType:
    """Return the class of a turn by its new input tokens and its output tokens."""
    ratio = num_input_tokens / max(1, num_output_tokens)
    if ratio < 0.25:
        return _first(_SHORT_INPUT, num_output_tokens)
    return _first(_BALANCED if ratio <= 2 else _LONG_INPUT, num_input_tokens)


def _first(limits: Sequence[tuple[float, WorkloadType]], value: int) -> WorkloadType:
    return next(name for limit, name in limits if value <= limit)


@dataclass(frozen=True)
class PpdEntry:
    """Turn-2 averages of one cell: prefilled by P (`pd`) and by the decode node (`ppd`). 0: that measurement failed."""

    context_class: ContextClass
    workload_type: WorkloadType
    qps: float
    pd_ttft_seconds: float
    ppd_ttft_seconds: float
    pd_tpot_seconds: float
    ppd_tpot_seconds: float

    @property
    def pd_failed(self) -> bool:
        return self.pd_ttft_seconds <= 0 or self.pd_tpot_seconds <= 0

    def score(self, *, ttft_weight: float, tpot_weight: float) -> float:
        """Return how much the decode node's own prefill gains: Algorithm 1, lines 4 to 6. P→D must not have failed."""
        ttft_gain = (self.pd_ttft_seconds - self.ppd_ttft_seconds) / self.pd_ttft_seconds
        tpot_loss = (self.ppd_tpot_seconds - self.pd_tpot_seconds) / self.pd_tpot_seconds
        return ttft_weight * ttft_gain - tpot_weight * tpot_loss


@dataclass(frozen=True)
class PpdTable:
    """The measured cells and the operator's weights.

    Raises:
        ValueError: a cell is there twice, there is none, or a weight is negative.
    """

    entries: tuple[PpdEntry, ...]
    ttft_weight: float = 1.0
    tpot_weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError("a PPD table has at least one entry")
        if min(self.ttft_weight, self.tpot_weight) < 0:
            raise ValueError("weights are at least 0")
        if len(self._cells) != len(self.entries):
            raise ValueError("a cell of context class, workload and qps is there twice")

    @cached_property
    def _cells(self) -> Mapping[tuple[ContextClass, WorkloadType, float], PpdEntry]:
        return {(entry.context_class, entry.workload_type, entry.qps): entry for entry in self.entries}

    @cached_property
    def _measured_qps(self) -> frozenset[float]:
        return frozenset(entry.qps for entry in self.entries)

    def nearest_qps(self, qps: float) -> float:
        """Return the measured rate next to `qps`, the higher one of two equally near."""
        return min(self._measured_qps, key=lambda rate: (abs(rate - qps), -rate))

    def find(self, context: ContextClass, workload: WorkloadType, qps: float) -> PpdEntry | None:
        """Return the cell at the nearest measured rate, or None when it was not measured."""
        return self._cells.get((context, workload, self.nearest_qps(qps)))

    def score(self, entry: PpdEntry) -> float:
        return entry.score(ttft_weight=self.ttft_weight, tpot_weight=self.tpot_weight)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> PpdTable:
        """Return the inverse of `to_dict`."""
        entries = tuple(PpdEntry(**entry) for entry in fields["entries"])
        return PpdTable(entries, fields["ttft_weight"], fields["tpot_weight"])


def read_measured(fields: Mapping[str, Any]) -> PpdTable:
    """Return a table in the form of the authors' decision engine: milliseconds, weights in `weights`.

    Raises:
        ValueError: a field is missing or of another type.
    """
    try:
        entries = tuple(_measured(entry) for entry in fields["entries"])
        weights = fields["weights"]
        return PpdTable(entries, float(weights["w_ttft"]), float(weights["w_tpot"]))
    except (KeyError, TypeError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"not a PPD decision table with `entries` and `weights`: {why}") from error


def to_measured(table: PpdTable) -> dict[str, Any]:
    """Return the inverse of `read_measured`, with each cell's score and whether it is local."""
    weights = {"w_ttft": table.ttft_weight, "w_tpot": table.tpot_weight}
    return {"weights": weights, "entries": [_as_measured(table, entry) for entry in table.entries]}


def _as_measured(table: PpdTable, entry: PpdEntry) -> dict[str, Any]:
    score = 0.0 if entry.pd_failed else table.score(entry)
    return {
        "context_class": entry.context_class,
        "workload_type": entry.workload_type,
        "qps": entry.qps,
        "use_ppd": entry.pd_failed or score > 0,
        "pd_ttft_ms": entry.pd_ttft_seconds * 1000,
        "ppd_ttft_ms": entry.ppd_ttft_seconds * 1000,
        "pd_tpot_ms": entry.pd_tpot_seconds * 1000,
        "ppd_tpot_ms": entry.ppd_tpot_seconds * 1000,
        "score": score,
    }


def _measured(entry: Mapping[str, Any]) -> PpdEntry:
    return PpdEntry(
        entry["context_class"],
        entry["workload_type"],
        float(entry["qps"]),
        float(entry["pd_ttft_ms"]) / 1000,
        float(entry["ppd_ttft_ms"]) / 1000,
        float(entry["pd_tpot_ms"]) / 1000,
        float(entry["ppd_tpot_ms"]) / 1000,
    )


@dataclass(frozen=True)
class PpdRun:
    """Turn-2 averages of one workload at one rate, all turns prefilled one way."""

    context_class: ContextClass
    workload_type: WorkloadType
    qps: float
    ttft_seconds: float
    tpot_seconds: float
    success_ratio: float


MIN_SUCCESS_RATIO = 0.95  # below it a run has failed and its averages say nothing


def build_table(pd: Iterable[PpdRun], ppd: Iterable[PpdRun], *, ttft_weight: float, tpot_weight: float) -> PpdTable:
    """Phase 1 of Algorithm 1: the table out of runs with x = 0 (`pd`) and x = 1 (`ppd`); a cell needs both.

    A cell whose P→D failed is local; one whose local prefill failed is left out, unless P→D failed too.

    Raises:
        ValueError: no cell was measured both ways.
    """
    cells = {(run.context_class, run.workload_type, run.qps): run for run in ppd}
    entries = []
    for run in pd:
        other = cells.get((run.context_class, run.workload_type, run.qps))
        failed = run.success_ratio < MIN_SUCCESS_RATIO
        if other is None or (other.success_ratio < MIN_SUCCESS_RATIO and not failed):
            continue
        ttft, tpot = (0.0, 0.0) if failed else (run.ttft_seconds, run.tpot_seconds)
        cell = (run.context_class, run.workload_type, run.qps)
        entries.append(PpdEntry(*cell, ttft, other.ttft_seconds, tpot, other.tpot_seconds))
    return PpdTable(tuple(entries), ttft_weight, tpot_weight)


@dataclass(frozen=True)
class LaterTurn:
    """A later turn as the table sees it: new tokens, cached ones on the decode node, output limit (0: none named)."""

    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int = 0


def prefills_locally(table: PpdTable, turn: LaterTurn, *, qps: float, mode: PpdMode) -> bool:
    """Return whether the decode node that holds the KV prefills a later turn itself (x* = 1)."""
    if mode == "authors" and turn.num_input_tokens < BYPASS_TOKENS:
        return True
    output = turn.num_output_tokens or DEFAULT_OUTPUT_TOKENS
    context = context_class(turn.num_cached_tokens)
    entry = table.find(context, workload_type(turn.num_input_tokens, output), qps)
    if entry is None or entry.pd_failed:
        return True
    return table.score(entry) > 0


MIN_TURNS = 20  # of one side of a cell, before they count
FAILED_SECONDS = 60.0
MAX_TURNS = 200  # the latest of one side of a cell that are averaged
_Cell = tuple[ContextClass, WorkloadType, float]
_UNKNOWN = (None, None)


@dataclass(frozen=True)
class ServedTurn:
    """One later turn as it was answered: `qps` and `turn` are those of its decision, `at` seconds on one clock.

    `tpot_seconds` None: not known. A turn that failed counts as one whose first token took `FAILED_SECONDS`.
    """

    turn: LaterTurn
    qps: float
    was_local: bool
    ttft_seconds: float
    tpot_seconds: float | None
    at: float


class PpdRefresh:
    """A table and the turns of late."""

    def __init__(self, table: PpdTable, *, window_seconds: float) -> None:
        self._table = table
        self._window_seconds = window_seconds
        self._served: dict[tuple[_Cell, bool], deque[ServedTurn]] = {}

    def note(self, served: ServedTurn) -> None:
        """Take one turn; of cells that the table lacks there is nothing to compare it with."""
        entry = self._entry(served)
        if entry is not None:
            cell = (entry.context_class, entry.workload_type, entry.qps)
            self._served.setdefault((cell, served.was_local), deque(maxlen=MAX_TURNS)).append(served)

    def _entry(self, served: ServedTurn) -> PpdEntry | None:
        turn = served.turn
        workload = workload_type(turn.num_input_tokens, turn.num_output_tokens or DEFAULT_OUTPUT_TOKENS)
        return self._table.find(context_class(turn.num_cached_tokens), workload, served.qps)

    def table(self, now: float) -> PpdTable:
        """Return the table with every side that was measured anew."""
        fresh = {key: _averages(turns, now - self._window_seconds) for key, turns in self._served.items()}
        return replace(self._table, entries=tuple(_renewed(entry, fresh) for entry in self._table.entries))


def _averages(turns: Iterable[ServedTurn], since: float) -> tuple[float | None, float | None]:
    """Mean TTFT and TPOT in seconds, each when enough turns have it."""
    late = [turn for turn in turns if turn.at > since]
    tpots = [its.tpot_seconds for its in late if its.tpot_seconds is not None]
    return _mean([its.ttft_seconds for its in late]), _mean(tpots)


def _mean(seconds: Sequence[float]) -> float | None:
    return fmean(seconds) if len(seconds) >= MIN_TURNS else None


def _renewed(entry: PpdEntry, fresh: Mapping[tuple[_Cell, bool], tuple[float | None, float | None]]) -> PpdEntry:
    cell = (entry.context_class, entry.workload_type, entry.qps)
    pd, ppd = fresh.get((cell, False), _UNKNOWN), fresh.get((cell, True), _UNKNOWN)
    return PpdEntry(
        *cell,
        pd_ttft_seconds=pd[0] or entry.pd_ttft_seconds,
        ppd_ttft_seconds=ppd[0] or entry.ppd_ttft_seconds,
        pd_tpot_seconds=pd[1] or entry.pd_tpot_seconds,
        ppd_tpot_seconds=ppd[1] or entry.ppd_tpot_seconds,
    )
