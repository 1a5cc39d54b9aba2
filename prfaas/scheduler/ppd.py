"""PPD's decision table: the decode node that holds a later turn's KV prefills the turn, or a PD-P instance does.

This is Algorithm 1 of the PPD paper (arXiv 2603.13358): turn 1 goes P→D, later turns follow the table. As in the public
engine of its authors, the decode node also prefills if the measurement of P→D failed, or if the table lacks the cell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Literal, NamedTuple

ContextClass = Literal["small", "large"]
WorkloadType = Literal[
    "tiny", "short_gen", "long_gen", "very_long_gen", "small_bal", "mid_bal", "mid_paste", "big_paste", "huge_paste"
]
DEFAULT_OUTPUT_TOKENS = 128  # Output length of a request that names no limit.
SMALL_CONTEXT_TOKENS = 512
MIN_TURNS = 20  # Turns that one side of a cell needs before a refresh uses them.
MAX_TURNS = 200  # Latest turns of one side of a cell that a refresh averages.
FAILED_SECONDS = 60.0
REFRESH_SECONDS = 5.0
WINDOW_SECONDS = 600.0  # Turns of so long refresh the table.

# Class limits. A value belongs to the first entry whose limit it does not exceed.
_SHORT_INPUT: Sequence[tuple[float, WorkloadType]] = (  # By output tokens, for input/output below 0.25.
    (64, "tiny"),
    (256, "short_gen"),
    (512, "long_gen"),
    (float("inf"), "very_long_gen"),
)
# By input tokens, for input/output up to 2.
_BALANCED: Sequence[tuple[float, WorkloadType]] = ((64, "small_bal"), (float("inf"), "mid_bal"))
_LONG_INPUT: Sequence[tuple[float, WorkloadType]] = (  # By input tokens.
    (256, "mid_paste"),
    (512, "big_paste"),
    (float("inf"), "huge_paste"),
)


def context_class(num_cached_tokens: int) -> ContextClass:
    """Return the class of the KV on the decode node. `large`, the last measured class, includes all longer contexts."""
    return "small" if num_cached_tokens <= SMALL_CONTEXT_TOKENS else "large"


def workload_type(num_input_tokens: int, num_output_tokens: int) -> WorkloadType:
    """Return the class of a turn by its new input tokens and its output tokens."""
    ratio = num_input_tokens / max(1, num_output_tokens)
    if ratio < 0.25:
        return _classify(_SHORT_INPUT, num_output_tokens)
    return _classify(_BALANCED if ratio <= 2 else _LONG_INPUT, num_input_tokens)


def _classify(limits: Sequence[tuple[float, WorkloadType]], value: int) -> WorkloadType:
    return next(name for limit, name in limits if value <= limit)


class TableCell(NamedTuple):
    """One cell of the table. `qps` is in requests per second; each conversation makes two requests."""

    context_class: ContextClass
    workload_type: WorkloadType
    qps: float


@dataclass(frozen=True)
class PpdEntry:
    """Turn-2 averages of one cell: prefilled by P (`pd`) and by the decode node (`ppd`). 0 is a failed measurement."""

    context_class: ContextClass
    workload_type: WorkloadType
    qps: float
    pd_ttft_seconds: float
    ppd_ttft_seconds: float
    pd_tpot_seconds: float
    ppd_tpot_seconds: float

    @property
    def cell(self) -> TableCell:
        return TableCell(self.context_class, self.workload_type, self.qps)

    @property
    def pd_failed(self) -> bool:
        return self.pd_ttft_seconds <= 0 or self.pd_tpot_seconds <= 0

    def score(self, *, ttft_weight: float, tpot_weight: float) -> float:
        """Return the gain of prefilling on the decode node: Algorithm 1, lines 4 to 6. P→D must not have failed."""
        ttft_gain = (self.pd_ttft_seconds - self.ppd_ttft_seconds) / self.pd_ttft_seconds
        tpot_loss = (self.ppd_tpot_seconds - self.pd_tpot_seconds) / self.pd_tpot_seconds
        return ttft_weight * ttft_gain - tpot_weight * tpot_loss


@dataclass(frozen=True)
class PpdTable:
    """Measured cells and the operator's weights.

    Raises:
        ValueError: there is no cell, a cell appears twice, or a weight is negative.
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
            raise ValueError("a cell of context class, workload and qps appears twice")

    @cached_property
    def _cells(self) -> Mapping[TableCell, PpdEntry]:
        return {entry.cell: entry for entry in self.entries}

    @cached_property
    def _measured_qps(self) -> frozenset[float]:
        return frozenset(entry.qps for entry in self.entries)

    def nearest_qps(self, qps: float) -> float:
        """Return the measured rate next to `qps`; of two equally near rates the higher one."""
        return min(self._measured_qps, key=lambda rate: (abs(rate - qps), -rate))

    def find(self, turn: LaterTurn, qps: float) -> PpdEntry | None:
        """Return the cell of a turn at the nearest measured rate, or None if it was not measured."""
        workload = workload_type(turn.num_input_tokens, turn.num_output_tokens or DEFAULT_OUTPUT_TOKENS)
        return self._cells.get(TableCell(context_class(turn.num_cached_tokens), workload, self.nearest_qps(qps)))

    def score(self, entry: PpdEntry) -> float:
        return entry.score(ttft_weight=self.ttft_weight, tpot_weight=self.tpot_weight)


@dataclass(frozen=True)
class LaterTurn:
    """Properties of a later turn: new tokens, tokens cached on the decode node, and the output limit (0 if none)."""

    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int = 0


def prefills_locally(table: PpdTable, turn: LaterTurn, *, qps: float) -> bool:
    """Return whether the decode node that holds the KV prefills a later turn itself (x* = 1)."""
    entry = table.find(turn, qps)
    return entry is None or entry.pd_failed or table.score(entry) > 0


# --- Tables in the form of the authors' decision engine ---

_TIMES = ("pd_ttft", "ppd_ttft", "pd_tpot", "ppd_tpot")


def read_measured(fields: Mapping[str, Any]) -> PpdTable:
    """Return a table from the authors' form: milliseconds, and weights in `weights`.

    Raises:
        ValueError: a field is missing or has another type.
    """
    try:
        entries = tuple(_read_entry(entry) for entry in fields["entries"])
        weights = fields["weights"]
        return PpdTable(entries, float(weights["w_ttft"]), float(weights["w_tpot"]))
    except (KeyError, TypeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"not a PPD decision table with `entries` and `weights`: {reason}") from error


def _read_entry(entry: Mapping[str, Any]) -> PpdEntry:
    seconds = {f"{name}_seconds": float(entry[f"{name}_ms"]) / 1000 for name in _TIMES}
    return PpdEntry(entry["context_class"], entry["workload_type"], float(entry["qps"]), **seconds)


def to_measured(table: PpdTable) -> dict[str, Any]:
    """Return the inverse of `read_measured`, with each cell's score and decision."""
    weights = {"w_ttft": table.ttft_weight, "w_tpot": table.tpot_weight}
    return {"weights": weights, "entries": [_entry_fields(table, entry) for entry in table.entries]}


def _entry_fields(table: PpdTable, entry: PpdEntry) -> dict[str, Any]:
    score = 0.0 if entry.pd_failed else table.score(entry)
    return {
        "context_class": entry.context_class,
        "workload_type": entry.workload_type,
        "qps": entry.qps,
        "use_ppd": entry.pd_failed or score > 0,
        **{f"{name}_ms": getattr(entry, f"{name}_seconds") * 1000 for name in _TIMES},
        "score": score,
    }


# --- Tables that follow the turns served ---


@dataclass(frozen=True)
class ServedTurn:
    """One later turn as it was served, with the `qps` and `turn` of its decision. `at` is seconds on one clock.

    `tpot_seconds` is None if unknown. A failed turn counts as one whose first token took `FAILED_SECONDS`.
    """

    turn: LaterTurn
    qps: float
    was_local: bool
    ttft_seconds: float
    tpot_seconds: float | None
    at: float


class PpdRefresh:
    """Table whose cells follow the turns served during the last `window_seconds`."""

    def __init__(self, table: PpdTable, *, window_seconds: float = WINDOW_SECONDS) -> None:
        self._table = self._current = table
        self._due = 0.0
        self._window_seconds = window_seconds
        self._served: dict[tuple[TableCell, bool], deque[ServedTurn]] = {}

    def note(self, served: ServedTurn) -> None:
        """Take one turn. A turn of a cell that the table lacks is ignored."""
        entry = self._table.find(served.turn, served.qps)
        if entry is not None:
            self._served.setdefault((entry.cell, served.was_local), deque(maxlen=MAX_TURNS)).append(served)

    def current(self, now: float) -> PpdTable:
        """Return the table, at most `REFRESH_SECONDS` old."""
        if now >= self._due:
            self._current, self._due = self.table(now), now + REFRESH_SECONDS
        return self._current

    def table(self, now: float) -> PpdTable:
        """Return the table with every side of a cell that has enough recent turns."""
        return replace(self._table, entries=tuple(self._refreshed(entry, now) for entry in self._table.entries))

    def _refreshed(self, entry: PpdEntry, now: float) -> PpdEntry:
        pd_ttft, pd_tpot = self._averages(entry.cell, False, now)
        ppd_ttft, ppd_tpot = self._averages(entry.cell, True, now)
        return PpdEntry(
            *entry.cell,
            pd_ttft_seconds=pd_ttft or entry.pd_ttft_seconds,
            ppd_ttft_seconds=ppd_ttft or entry.ppd_ttft_seconds,
            pd_tpot_seconds=pd_tpot or entry.pd_tpot_seconds,
            ppd_tpot_seconds=ppd_tpot or entry.ppd_tpot_seconds,
        )

    def _averages(self, cell: TableCell, was_local: bool, now: float) -> tuple[float | None, float | None]:
        """Return the mean TTFT and TPOT of one side of a cell, each if enough recent turns have it."""
        since = now - self._window_seconds
        recent = [turn for turn in self._served.get((cell, was_local), ()) if turn.at > since]
        tpots = [turn.tpot_seconds for turn in recent if turn.tpot_seconds is not None]
        return _mean([turn.ttft_seconds for turn in recent]), _mean(tpots)


def _mean(seconds: Sequence[float]) -> float | None:
    return fmean(seconds) if len(seconds) >= MIN_TURNS else None
