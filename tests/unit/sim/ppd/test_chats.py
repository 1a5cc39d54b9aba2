"""Drawn conversations have the spread that the authors' measurements show of theirs."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from benchmarks.studies.ppd.chats import DATA_SETS, Lengths
from prfaas.sim.workload.conversations import Turn

# Mean, P50, P90 and P99 of the answers' tokens, and turns of a conversation, as measured.
MEASURED = {"ShareGPT-like": ((309, 283, 605, 913), 4.408), "WildChat-like": ((274, 180, 652, 1201), 4.112)}


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[list[Turn]]]:
    return {name: data_set.draw(4_000, seed=1) for name, data_set in DATA_SETS.items()}


@pytest.mark.parametrize("name", DATA_SETS)
def test_answers_are_as_long_as_measured(name: str, drawn: dict[str, list[list[Turn]]]) -> None:
    answers = [turn.num_output_tokens for chat in drawn[name] for turn in chat]
    found = (fmean(answers), *np.quantile(answers, (0.5, 0.9, 0.99)))
    assert found == pytest.approx(MEASURED[name][0], rel=0.04)


@pytest.mark.parametrize("name", DATA_SETS)
def test_conversations_have_two_turns_or_more_and_as_many_as_measured(
    name: str, drawn: dict[str, list[list[Turn]]]
) -> None:
    turns = [len(chat) for chat in drawn[name]]
    assert min(turns) == 2
    assert fmean(turns) == pytest.approx(MEASURED[name][1], rel=0.04)


def test_same_seed_draws_the_same() -> None:
    data_set = DATA_SETS["ShareGPT-like"]
    assert data_set.draw(20, seed=3) == data_set.draw(20, seed=3) != data_set.draw(20, seed=4)


def test_a_length_is_between_the_quantiles_around_it() -> None:
    drawn = Lengths((0.0, 0.5, 1.0), (10, 20, 4000)).draw(np.random.default_rng(1), 2_000)
    assert 10 <= min(drawn) <= max(drawn) <= 4000
    assert np.mean(np.array(drawn) <= 20) == pytest.approx(0.5, abs=0.05)
