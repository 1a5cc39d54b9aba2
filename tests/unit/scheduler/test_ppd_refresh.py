"""Refresh of a PPD table from served turns."""

import pytest

from prfaas.scheduler.ppd import MIN_TURNS, LaterTurn, PpdEntry, PpdRefresh, PpdTable, ServedTurn, prefills_locally

ENTRY = PpdEntry("large", "big_paste", 2.0, 0.2, 0.1, 0.01, 0.01)
TABLE = PpdTable((ENTRY,))
TURN = LaterTurn(512, 2048, 64)  # In the cell of ENTRY.
WINDOW_SECONDS = 600.0


def refreshed(
    num: int, *, was_local: bool = True, ttft: float = 0.4, at: float = 1.0, turn: LaterTurn = TURN
) -> PpdRefresh:
    refresh = PpdRefresh(TABLE, window_seconds=WINDOW_SECONDS)
    for _ in range(num):
        refresh.note(ServedTurn(turn, 2.1, was_local=was_local, ttft_seconds=ttft, tpot_seconds=0.02, at=at))
    return refresh


def test_enough_turns_replace_one_side_of_a_cell() -> None:
    assert refreshed(MIN_TURNS).table(2.0).entries == (PpdEntry("large", "big_paste", 2.0, 0.2, 0.4, 0.01, 0.02),)
    of_pd = refreshed(MIN_TURNS, was_local=False).table(2.0)
    assert of_pd.entries == (PpdEntry("large", "big_paste", 2.0, 0.4, 0.1, 0.02, 0.01),)


def test_slow_decode_node_loses_its_turns() -> None:
    assert prefills_locally(TABLE, TURN, qps=2.0)
    assert not prefills_locally(refreshed(MIN_TURNS).table(2.0), TURN, qps=2.0)


def test_too_few_turns_change_nothing() -> None:
    assert refreshed(MIN_TURNS - 1).table(2.0) == TABLE


def test_turns_outside_the_window_do_not_count() -> None:
    assert refreshed(MIN_TURNS, at=1.0).table(1.0 + WINDOW_SECONDS) == TABLE


def test_latest_turns_are_averaged() -> None:
    refresh = refreshed(400, ttft=9.0)
    for _ in range(200):
        refresh.note(ServedTurn(TURN, 2.0, was_local=True, ttft_seconds=0.3, tpot_seconds=0.01, at=2.0))
    assert refresh.table(3.0).entries[0].ppd_ttft_seconds == pytest.approx(0.3)


def test_unmeasured_cell_stays_absent() -> None:
    assert refreshed(MIN_TURNS, turn=LaterTurn(16, 100, 32)).table(2.0) == TABLE
