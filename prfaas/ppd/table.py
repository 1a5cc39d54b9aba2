"""PPD's table from measured runs: phase 1 of Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prfaas.scheduler.ppd import PpdEntry, PpdTable, TableCell

MIN_SUCCESS_RATIO = 0.95  # Below it a run has failed, and its averages say nothing.


@dataclass(frozen=True)
class PpdRun:
    """Turn-2 averages of one cell, with all turns prefilled in the same way."""

    cell: TableCell
    ttft_seconds: float
    tpot_seconds: float
    success_ratio: float

    @property
    def has_failed(self) -> bool:
        return self.success_ratio < MIN_SUCCESS_RATIO


def build_table(pd: Iterable[PpdRun], ppd: Iterable[PpdRun], *, ttft_weight: float, tpot_weight: float) -> PpdTable:
    """Return the table from runs with x = 0 (`pd`) and x = 1 (`ppd`): phase 1 of Algorithm 1. A cell needs both.

    A cell with a failed P→D run is local. A cell is left out if only its local run failed.

    Raises:
        ValueError: no cell was measured both ways.
    """
    local_runs = {run.cell: run for run in ppd}
    entries = []
    for run in pd:
        local = local_runs.get(run.cell)
        if local is None or (local.has_failed and not run.has_failed):
            continue
        ttft, tpot = (0.0, 0.0) if run.has_failed else (run.ttft_seconds, run.tpot_seconds)
        entries.append(PpdEntry(*run.cell, ttft, local.ttft_seconds, tpot, local.tpot_seconds))
    return PpdTable(tuple(entries), ttft_weight, tpot_weight)
