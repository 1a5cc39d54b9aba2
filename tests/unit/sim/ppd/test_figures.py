"""x between 0 and 1, and by a table: who prefills later turns."""

from __future__ import annotations

import pytest

from benchmarks.studies.ppd.deployments import LaterTurns
from benchmarks.studies.ppd.figures import Case, Outcome, outcome
from prfaas.ppd.workloads import FIRST_TURNS, SECOND_TURNS
from prfaas.scheduler.ppd import ContextClass, PpdEntry, PpdTable, WorkloadType
from prfaas.sim.workload.conversations import Turn

TURNS = (Turn(512, 32), *(Turn(128, 16) for _ in range(7)))


def run(later: LaterTurns) -> Outcome:
    return outcome(Case("1P_3D", (TURNS,), 2.0, later))


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_share_of_local_turns_is_x(ratio: float) -> None:
    assert run(LaterTurns(ratio)).local_ratio == pytest.approx(ratio, abs=0.06)


@pytest.mark.parametrize(("ttft", "local_ratio"), [(0.5, 1.0), (2.0, 0.0)])
def test_dynamic_follows_the_table(ttft: float, local_ratio: float) -> None:
    cells: list[tuple[ContextClass, WorkloadType]] = [
        (context, kind) for context in FIRST_TURNS for kind in SECOND_TURNS
    ]
    table = PpdTable(tuple(PpdEntry(context, kind, 1.0, 1.0, ttft, 1.0, 1.0) for context, kind in cells))
    assert run(LaterTurns(table=table, qps=1.0)).local_ratio == local_ratio
