"""x between 0 and 1, and by a table: who prefills later turns; and the outcomes behind the paper's figures."""

from __future__ import annotations

import pytest

from benchmarks.studies.ppd.deployments import GRID, LaterTurns
from benchmarks.studies.ppd.experiment import TIMEOUT_SECONDS
from benchmarks.studies.ppd.figures import (
    LONG_CONVERSATION,
    NUM_CHATS,
    Case,
    Outcome,
    heavy,
    multi_turn,
    outcome,
    prefills_later_turns,
)
from prfaas.errors import ConfigError
from prfaas.ppd.workloads import FIRST_TURNS, SECOND_TURNS
from prfaas.scheduler.ppd import ContextClass, PpdEntry, PpdTable, WorkloadType
from prfaas.sim.workload.conversations import Turn

TURNS = (Turn(512, 32), *(Turn(128, 16) for _ in range(7)))


def run(later: LaterTurns) -> Outcome:
    return outcome(Case("1P_3D", (TURNS,), 2.0, later))


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 1.0])
def test_share_of_local_turns_is_x(ratio: float) -> None:
    assert run(LaterTurns(ratio)).local_ratio == pytest.approx(ratio, abs=0.06)


def test_more_local_prefill_makes_first_tokens_earlier() -> None:
    never, half, always = (run(LaterTurns(ratio)) for ratio in (0.0, 0.5, 1.0))
    assert never.later_ttft_seconds > half.later_ttft_seconds > always.later_ttft_seconds


@pytest.mark.parametrize(("ttft", "local_ratio"), [(0.5, 1.0), (2.0, 0.0)])
def test_dynamic_follows_the_table(ttft: float, local_ratio: float) -> None:
    cells: list[tuple[ContextClass, WorkloadType]] = [
        (context, kind) for context in FIRST_TURNS for kind in SECOND_TURNS
    ]
    table = PpdTable(tuple(PpdEntry(context, kind, 1.0, 1.0, ttft, 1.0, 1.0) for context, kind in cells))
    assert run(LaterTurns(table=table, qps=1.0)).local_ratio == local_ratio


def test_replica_prefills_all_turns_for_any_x() -> None:
    assert outcome(Case("4R", (TURNS,), 2.0, LaterTurns(0.0))).local_ratio == 1.0


def test_the_long_conversation_is_the_papers() -> None:
    assert sum(turn.num_new_tokens for turn in LONG_CONVERSATION) == 10_000
    assert sum(turn.num_output_tokens for turn in LONG_CONVERSATION) == 100
    assert len(LONG_CONVERSATION) == 5


def test_waiting_at_the_client_counts_neither_as_latency_nor_as_timeout() -> None:
    crowd = outcome(Case("1P_1D", ((Turn(16, 1200), Turn(16, 16)),), 40.0, LaterTurns(1.0), count=200))
    # At most fifty conversations are active; the rest wait.
    assert crowd.latency.quantile(0.99) < TIMEOUT_SECONDS
    assert crowd.num_late == 0
    alone = outcome(Case("1P_1D", ((Turn(16, 5000), Turn(16, 16)),), 1.0, LaterTurns(1.0), count=2))
    assert alone.num_late == 2


def test_heavy_conversations_have_longer_prompts_than_answers() -> None:
    quiet, loud = (Turn(900, 10), Turn(20, 300)), (Turn(10, 10), Turn(500, 300))
    assert heavy({"a": [quiet], "b": [loud]}) == [loud]
    assert heavy({"a": [quiet]}) == [quiet]


def test_conversations_with_later_turns_are_chosen_evenly() -> None:
    short, long = (Turn(1, 1),), (Turn(2, 2), Turn(3, 3))
    assert multi_turn([short, long, short]) == [long]
    assert len(multi_turn([long] * 1700)) == NUM_CHATS
    with pytest.raises(ConfigError, match="none of them has a second turn"):
        multi_turn([short])


def test_ten_configurations_prefill_later_turns_where_they_decode() -> None:
    assert sum(map(prefills_later_turns, GRID)) == 10
