"""Two-turn conversations with which PPD's table is measured, and the table from the measured runs."""

from collections.abc import Iterable
from dataclasses import dataclass

from prfaas.scheduler.ppd import ContextClass, PpdEntry, PpdTable, TableCell, WorkloadType

NUM_TURNS = 2  # Requests of one conversation.
# The authors' grid, in conversations that begin per second.
QPS = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0)
REQUEST_RATES = tuple(NUM_TURNS * rate for rate in QPS)  # The same loads in requests per second.
# Prompt and answer of the first turn, in tokens.
FIRST_TURNS: dict[ContextClass, tuple[int, int]] = {"small": (128, 128), "large": (1024, 1024)}
# New tokens and answer of the second turn.
SECOND_TURNS: dict[WorkloadType, tuple[int, int]] = {
    "tiny": (16, 32),
    "short_gen": (32, 256),
    "long_gen": (32, 512),
    "very_long_gen": (64, 1024),
    "small_bal": (64, 64),
    "mid_bal": (128, 128),
    "mid_paste": (256, 64),
    "big_paste": (512, 64),
    "huge_paste": (1024, 32),
}

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
