"""Adaptive resource manager for random profiles and loads."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from prfaas.model.cost.colocation import OVERALLOCATED, Partition, ShareTable
from prfaas.scheduler.colocation import (
    PartitionState,
    SharingPolicy,
    StepLoad,
    next_sharing,
    target_partition,
)

SLO = 0.05
SECONDS = st.floats(0.001, 0.2)


@st.composite
def profiles(draw: st.DrawFn) -> ShareTable:
    shares = tuple(sorted(draw(st.sets(st.sampled_from([i / 10 for i in range(1, 10)]), min_size=1))))
    batches = tuple(sorted(draw(st.sets(st.integers(1, 128), min_size=1, max_size=5))))
    row = st.lists(SECONDS, min_size=len(shares), max_size=len(shares)).map(tuple)
    seconds = tuple(draw(row) for _ in batches)
    return ShareTable(shares, batches, seconds, tuple(draw(SECONDS) for _ in batches))


LOADS = st.builds(StepLoad, st.integers(0, 200), st.booleans())


@given(profiles(), LOADS)
def test_overallocation_is_used_if_allowed_and_else_the_smallest_sufficient_share(
    profile: ShareTable, load: StepLoad
) -> None:
    partition = target_partition(load, profile, SLO)
    if load.decode_batch == 0 or not load.prefill_busy:
        return
    per_share, overallocated = profile.at(load.decode_batch)
    meeting = [share for share, seconds in zip(profile.shares, per_share, strict=True) if seconds <= SLO]
    if overallocated <= SLO:
        assert partition == OVERALLOCATED
    elif meeting:
        assert partition == Partition(meeting[0], 1 - meeting[0])
    else:
        assert per_share[profile.shares.index(partition.decode_share)] == min(per_share)
        assert partition.prefill_share == 1 - partition.decode_share


@given(profiles(), st.integers(1, 200))
def test_idle_side_leaves_its_share_to_the_busy_side(profile: ShareTable, batch: int) -> None:
    held = PartitionState(Partition(profile.shares[0], 1 - profile.shares[0]))
    policy = SharingPolicy(SLO)
    assert next_sharing(held, StepLoad(batch, False), profile, policy=policy).partition == Partition(1.0, 0.0)
    assert next_sharing(held, StepLoad(0, True), profile, policy=policy).partition == Partition(0.0, 1.0)


@given(profiles(), st.lists(LOADS, max_size=80), st.integers(1, 10))
def test_decode_gets_a_larger_share_at_once(profile: ShareTable, loads: list[StepLoad], dwell: int) -> None:
    sharing = PartitionState()
    for load in loads:
        sharing = next_sharing(sharing, load, profile, policy=SharingPolicy(SLO, dwell))
        if sharing.partition != target_partition(load, profile, SLO):
            seconds = profile.at(load.decode_batch)[0][profile.shares.index(sharing.partition.decode_share)]
            assert seconds <= SLO


@given(profiles(), LOADS, st.lists(LOADS, max_size=20), st.integers(1, 10))
def test_steady_load_reaches_its_target_within_the_dwell_time(
    profile: ShareTable, load: StepLoad, before: list[StepLoad], dwell: int
) -> None:
    policy, sharing = SharingPolicy(SLO, dwell), PartitionState()
    for earlier in before:
        sharing = next_sharing(sharing, earlier, profile, policy=policy)
    for _ in range(dwell):
        sharing = next_sharing(sharing, load, profile, policy=policy)
    assert sharing.partition == target_partition(load, profile, SLO)


@given(profiles(), st.lists(st.integers(1, 200), max_size=200), st.integers(2, 10))
def test_changes_are_bounded_by_the_dwell_time(profile: ShareTable, batches: list[int], dwell: int) -> None:
    """Decode's protection is relaxed at most once per dwell time, so turns of direction are at most twice that."""
    # More compute is never slower, a larger batch never faster.
    rows = [sorted(row, reverse=True) for row in profile.seconds]
    columns = [sorted(column) for column in zip(*rows, strict=True)]
    seconds = tuple(zip(*columns, strict=True))
    worst = ShareTable(profile.shares, profile.batches, seconds, tuple(sorted(profile.overallocated_seconds)))
    policy, sharing, levels = SharingPolicy(SLO, dwell), PartitionState(), []
    for batch in batches:
        sharing = next_sharing(sharing, StepLoad(batch, True), worst, policy=policy)
        partition = sharing.partition
        levels.append(0.0 if partition == OVERALLOCATED else partition.decode_share)
    moves = [b - a for a, b in pairwise(levels) if a != b]
    fastest = [min(*per_share, overallocated) for per_share, overallocated in map(worst.at, batches)]
    reachable = all(seconds <= SLO for seconds in fastest)
    if reachable:
        assert sum(move < 0 for move in moves) <= len(batches) / dwell
