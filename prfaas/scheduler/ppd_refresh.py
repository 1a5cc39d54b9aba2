"""PPD's table kept fresh: turns as they were answered take the place of the averages that were measured offline.

A cell's side (prefilled by P, or by the decode node) counts as measured anew while it has enough turns within the
window; when they have passed, the table's own averages hold again, so that a side that looked bad is tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from prfaas.scheduler.ppd import (
    DEFAULT_OUTPUT_TOKENS,
    ContextClass,
    PpdEntry,
    PpdTable,
    Turn,
    WorkloadType,
    context_class,
    workload_type,
)

MIN_TURNS = 20  # of one side of a cell, before they count
FAILED_SECONDS = 60.0
MAX_TURNS = 200  # the latest of one side of a cell that are averaged
_Cell = tuple[ContextClass, WorkloadType, float]
_UNKNOWN = (None, None)


@dataclass(frozen=True)
class Served:
    """One later turn as it was answered: `qps` and `turn` are those of its decision, `at` seconds on one clock.

    `tpot_seconds` None: not known. A turn that failed counts as one whose first token took `FAILED_SECONDS`.
    """

    turn: Turn
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
        self._served: dict[tuple[_Cell, bool], deque[Served]] = {}

    def note(self, served: Served) -> None:
        """Take one turn; of cells that the table lacks there is nothing to compare it with."""
        entry = self._entry(served)
        if entry is not None:
            cell = (entry.context_class, entry.workload_type, entry.qps)
            self._served.setdefault((cell, served.was_local), deque(maxlen=MAX_TURNS)).append(served)

    def _entry(self, served: Served) -> PpdEntry | None:
        turn = served.turn
        workload = workload_type(turn.num_input_tokens, turn.num_output_tokens or DEFAULT_OUTPUT_TOKENS)
        return self._table.find(context_class(turn.num_cached_tokens), workload, served.qps)

    def table(self, now: float) -> PpdTable:
        """The table with every side that was measured anew."""
        fresh = {key: _averages(turns, now - self._window_seconds) for key, turns in self._served.items()}
        return replace(self._table, entries=tuple(_renewed(entry, fresh) for entry in self._table.entries))


def _averages(turns: Iterable[Served], since: float) -> tuple[float | None, float | None]:
    """Mean TTFT and TPOT in seconds, each when enough turns have it."""
    late = [its for its in turns if its.at > since]
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
