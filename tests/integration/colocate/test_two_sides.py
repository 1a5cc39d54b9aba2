"""Any interleaving of front, prefill and decode, with deaths and cancellations, gives the sequential tokens."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.processes.shared_memory import Side, Word
from tests.integration.colocate.two_sides import TwoSides
from tests.support.sequential_generation import generate
from tests.unit.colocate.tiny import CACHE, tiny_model

torch.set_num_threads(1)

# The first prompts fill 1 to 5 blocks of 16 tokens; answers cross block borders.
PROMPTS = tuple(tuple((7 * i + 3 * j * j) % 320 for j in range(9 + 13 * i)) for i in range(6))
MAX_TOKENS = (1, 5, 18, 9, 12, 20)
ROOMY = CACHE
NEXT_TOKENS = 4
NARROW = CacheShape(num_blocks=8, block_tokens=16, num_state_slots=4)  # The largest request alone needs 7 blocks.


@functools.cache
def expected(index: int, max_tokens: int, stop_token: int | None = None) -> list[int]:
    return generate(tiny_model(), PROMPTS[index], max_tokens, stop_token=stop_token)


def next_turn(index: int) -> tuple[int, ...]:
    """Return a conversation's second prompt: the first one, its answer and a question."""
    return PROMPTS[index] + tuple(expected(index, MAX_TOKENS[index])) + (3, 1, 4, 1, 5)


@functools.cache
def expected_next(index: int) -> list[int]:
    return generate(tiny_model(), next_turn(index), NEXT_TOKENS)


def submit_next(sides: TwoSides, index: int) -> tuple[int, list[int]]:
    """Return the second turn, with what of it is kept."""
    assert sides.shelf is not None
    got: list[int] = []
    prompt = next_turn(index)
    prefix = sides.shelf.longest(prompt)
    number = sides.front.submit(
        prompt, NEXT_TOKENS, stop_token=None, on_token=lambda token, _: got.append(token), num_cached=len(prefix)
    )
    sides.shelf.expect(number, prefix)
    return number, got


def submit(sides: TwoSides, index: int, *, stop_token: int | None = None) -> tuple[int, list[int]]:
    got: list[int] = []
    number = sides.front.submit(
        PROMPTS[index], MAX_TOKENS[index], stop_token=stop_token, on_token=lambda token, _: got.append(token)
    )
    return number, got


def all_free(sides: TwoSides) -> bool:
    return sides.book.num_free_blocks == sides.shape.num_blocks - 1


ACTIONS = st.lists(
    st.one_of(
        st.sampled_from(["front", "prefill", "decode", "shelf", "prefill", "decode"]),
        st.sampled_from(["kill prefill", "kill decode", "cancel", "finish, then the next turn"]),
        st.integers(0, len(PROMPTS) - 1),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ACTIONS, st.sampled_from([ROOMY, NARROW]))
def test_any_interleaving_with_deaths_cancellations_and_kept_prefixes_gives_the_sequential_tokens(
    actions: list[str | int], shape: CacheShape
) -> None:
    sides = TwoSides(tiny_model(cache_shape=shape), shape, keeps=True)
    sides.model.cache.kv[:, :, 0], sides.model.cache.states[:, 0] = 0, 0
    submitted: list[tuple[list[int], int, list[int]]] = []
    cancelled: set[int] = set()
    index = 0
    for action in actions:
        if isinstance(action, int):
            index = action
            submitted.append((expected(index, MAX_TOKENS[index]), *submit(sides, index)))
        elif action.startswith("finish"):
            sides.finish()
            submitted.append((expected_next(index), *submit_next(sides, index)))
        elif action == "cancel" and submitted:
            cancelled.add(submitted[-1][1])
            sides.front.cancel(submitted[-1][1])
        elif action.startswith("kill"):
            sides.kill("prefill" if action.endswith("prefill") else "decode")
        elif action != "cancel":
            sides.turn(action)
    sides.finish()
    for whole, number, got in submitted:
        assert got == whole or (number in cancelled and got == whole[: len(got)])
    assert all_free(sides)
    sides.close()


@pytest.mark.parametrize("side", ["nobody", "prefill", "decode"])
def test_the_next_turn_resumes_where_the_last_one_ended_whoever_dies_meanwhile(side: str) -> None:
    """The load is held: the blocks are lent, the shelf has not turned."""
    sides = TwoSides(tiny_model(), ROOMY, keeps=True)
    submit(sides, 4)
    sides.finish()
    _, got = submit_next(sides, 4)
    for who in ("decode", "front", "prefill", "decode"):
        sides.turn(who)
    assert sides.board[Word.WAITING_LOAD] == 1
    if side != "nobody":
        sides.kill("prefill" if side == "prefill" else "decode")
    sides.finish()
    assert sides.shelf is not None and sides.shelf.num_loaded == (0 if side == "decode" else 1)
    assert got == expected_next(4) and all_free(sides)
    sides.close()


def test_a_token_computed_past_the_stop_token_is_dropped() -> None:
    stop = expected(5, 20)[4]
    sides = TwoSides(tiny_model(), ROOMY)
    _, got = submit(sides, 5, stop_token=stop)
    sides.finish()
    assert got == expected(5, 20, stop) and got[-1] == stop and len(got) < 20
    assert sides.board[Word.SURPLUS_TOKENS] == 1
    assert all_free(sides)
    sides.close()


def test_without_room_the_youngest_is_preempted_and_still_answers_right() -> None:
    sides = TwoSides(tiny_model(cache_shape=NARROW), NARROW)
    answers = [submit(sides, index) for index in (2, 2, 2)]
    sides.finish()
    assert sides.board[Word.PREEMPTIONS] > 0
    assert [got for _, got in answers] == [expected(2, MAX_TOKENS[2])] * 3


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("turns_before", range(6))
def test_the_death_of_either_side_after_any_turn_is_survived(side: Side, turns_before: int) -> None:
    sides = TwoSides(tiny_model(), ROOMY)
    answers = [submit(sides, index) for index in range(4)]
    for _ in range(turns_before):
        sides.turn("prefill"), sides.turn("decode"), sides.turn("front")
    sides.kill(side)
    sides.finish()
    assert [got for _, got in answers] == [expected(index, MAX_TOKENS[index]) for index in range(4)]
    assert all_free(sides)
    sides.close()
