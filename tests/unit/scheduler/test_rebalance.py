"""Copies of hot prefixes: destinations, and the conditions under which none is made."""

from dataclasses import replace

import pytest

from prfaas.scheduler.rebalance import (
    ByteBudget,
    HotPrefix,
    Participants,
    PlannedCopy,
    PrefixKey,
    RebalanceLimits,
    RebalanceState,
    drain_order,
    step,
)
from prfaas.types import AgentName, BlockHash, ClusterName

KEY: PrefixKey = ("m", BlockHash(b"k" * 16))
A, B, C, FAR = (AgentName(name) for name in ("a", "b", "c", "far"))
EAST, WEST = ClusterName("east"), ClusterName("west")
LIMITS = RebalanceLimits(1000.0, 1000.0)
CAST = Participants({A: EAST, B: EAST, C: EAST, FAR: WEST}, frozenset({A, B, C, FAR}))
HOT = HotPrefix(KEY, 4.0, 100, frozenset({A, B, C, FAR}), frozenset({A}))
FULL = RebalanceState(
    egress={EAST: ByteBudget(1000.0, 0.0), WEST: ByteBudget(1000.0, 0.0)},
    intake={name: ByteBudget(1000.0, 0.0) for name in (A, B, C, FAR)},
)


def _moves(
    state: RebalanceState = FULL, prefix: HotPrefix = HOT, cast: Participants = CAST, *, now: float = 0.0
) -> list[PlannedCopy]:
    return step(state, [prefix], cast, now=now, limits=LIMITS)[1]


def test_prefix_goes_to_one_node_at_a_time_and_first_within_its_cluster() -> None:
    assert _moves() == [PlannedCopy(KEY, A, B, 100)]
    assert _moves(prefix=replace(HOT, holders=frozenset({A, B}))) == [PlannedCopy(KEY, A, C, 100)]
    assert _moves(prefix=replace(HOT, holders=frozenset({A, B, C}))) == [PlannedCopy(KEY, A, FAR, 100)]


def test_node_that_received_least_is_next() -> None:
    tired = replace(FULL, intake={**FULL.intake, B: ByteBudget(200.0, 0.0)})
    assert _moves(tired) == [PlannedCopy(KEY, A, C, 100)]


@pytest.mark.parametrize(
    ("why", "prefix", "cast"),
    [
        ("it has as many holders as its hits deserve", replace(HOT, hits_per_second=1.9), CAST),
        ("nobody has it any more", replace(HOT, holders=frozenset()), CAST),
        ("its holder is not ours to command", HOT, replace(CAST, senders=frozenset({B, C}))),
        ("it is larger than a budget ever gets", replace(HOT, num_bytes=10_001), CAST),
        ("nobody else has the model", replace(HOT, nodes=frozenset({A})), CAST),
        ("the others leave", HOT, replace(CAST, leaving=frozenset({B, C, FAR}))),
        (
            "the link is full",
            replace(HOT, nodes=frozenset({A, FAR})),
            replace(CAST, full_links=frozenset({(EAST, WEST)})),
        ),
        (
            "those under way are enough",
            replace(HOT, hits_per_second=2.0),
            replace(CAST, under_way=(PlannedCopy(KEY, A, B, 100),)),
        ),
    ],
)
def test_no_copy_without_need_or_means(why: str, prefix: HotPrefix, cast: Participants) -> None:
    assert _moves(prefix=prefix, cast=cast) == [], why


def test_budgets_start_empty_and_fill_with_time() -> None:
    state, moves = step(RebalanceState(), [HOT], CAST, now=10.0, limits=LIMITS)
    assert moves == []
    assert _moves(state, now=10.05) == []
    assert _moves(state, now=10.125) == [PlannedCopy(KEY, A, B, 100)]


def test_leaving_holder_is_replaced_and_may_still_send() -> None:
    two = replace(HOT, hits_per_second=2.0, holders=frozenset({A, B}))
    assert _moves(prefix=two) == []
    assert _moves(prefix=two, cast=replace(CAST, leaving=frozenset({A}))) != []


def test_drain_moves_prefixes_in_demand_without_another_holder_hottest_first() -> None:
    def prefix(number: int, hits: float, *holders: AgentName) -> HotPrefix:
        return HotPrefix(("m", BlockHash(bytes([number]) * 16)), hits, 100, frozenset({A, B}), frozenset(holders))

    wanted, hotter = prefix(1, 1.0, A), prefix(2, 3.0, A)
    others = [prefix(3, 9.0, A, B), prefix(4, 9.0, B), prefix(5, 0.0, A)]
    assert drain_order([wanted, *others, hotter], A) == [hotter, wanted]
