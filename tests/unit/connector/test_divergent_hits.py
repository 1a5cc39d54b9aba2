"""Prompts whose attention vLLM holds beyond their states, and for which it must ask again."""

from __future__ import annotations

import pytest

from prfaas.connector.scheduler.divergent import DivergentHits


@pytest.mark.parametrize(
    ("offered", "local", "agreed", "again"),
    [
        (None, 512, 0, False),  # The agent has not replied.
        (700, 512, 0, False),  # The loadable prefix reaches beyond the local one.
        (512, 512, 0, True),  # Only the state is missing, which vLLM would not take.
        (256, 512, 0, True),
        (0, 512, 256, True),  # The promise is compared with the usable prefix.
        (256, 512, 512, False),  # The engine has the states too.
    ],
)
def test_a_request_is_asked_for_again_where_nothing_reaches_beyond_attention_that_is_of_no_use_alone(
    offered: int | None, local: int, agreed: int, again: bool
) -> None:
    hits = DivergentHits(is_supported=True)
    assert hits.asks_again("r", offered, local_tokens=local, agreed_tokens=lambda: agreed) == again
    assert hits.are_allowed != again


def test_an_engine_that_asks_in_the_same_way_again_gets_an_answer() -> None:
    hits = DivergentHits(is_supported=True)
    asked = [hits.asks_again("r", 256, local_tokens=512, agreed_tokens=lambda: 0) for _ in range(4)]
    assert asked == [True, False, True, False]


def test_other_requests_are_looked_up_as_before_once_it_has_ended() -> None:
    hits = DivergentHits(is_supported=True)
    assert hits.asks_again("r", 256, local_tokens=512, agreed_tokens=lambda: 0)
    hits.forget("another")
    assert not hits.are_allowed
    hits.forget("r")
    assert hits.are_allowed
