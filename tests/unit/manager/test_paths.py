"""Paths between clusters: their figures are current, and the threshold follows once a second."""

from dataclasses import replace

import pytest

from prfaas.index.membership import LinkFigures
from prfaas.manager.planning.paths import LOW_SECONDS, STEP_SECONDS
from prfaas.types import AgentName, ClusterName
from tests.support.timed_world import TimedWorld

LINK = LinkFigures(AgentName("d1"), 1e6, 10e6, 0.05, 0.05, 0, 0.0, num_connections=4)
CHOKED = replace(LINK, queued_bytes=1 << 30)


class LinkedWorld(TimedWorld):
    """Two clusters of one node each."""

    def __init__(self) -> None:
        super().__init__()
        self.register("p1", "east")
        self.register("d1", "west")


@pytest.fixture
def site() -> LinkedWorld:
    site = LinkedWorld()
    site.report("p1", LINK)
    site.paths.step()
    return site


def test_view_shows_the_latest_report(site: LinkedWorld) -> None:
    site.report("p1", replace(LINK, bytes_per_second=7e6))
    (view,) = site.paths.views()
    assert view.bytes_per_second == 7e6


def test_path_is_down_at_the_next_step(site: LinkedWorld) -> None:
    site.report("p1", replace(LINK, is_down=True))
    site.paths.step()
    assert site.paths.down == {("east", "west")}


def test_threshold_changes_once_a_second(site: LinkedWorld) -> None:
    site.report("p1", CHOKED)
    site.paths.step()
    assert site.paths.views()[0].congestion.multiplier == 1
    site.now = STEP_SECONDS
    site.paths.step()
    raised = site.paths.views()[0].congestion.multiplier
    site.paths.step()
    assert site.paths.views()[0].congestion.multiplier == raised > 1


def test_losses_of_the_whole_second_count(site: LinkedWorld) -> None:
    for second in range(2):
        site.report("p1", replace(LINK, retransmit_ratio=0.5))
        site.paths.step()
        site.report("p1", LINK)
        site.now = (second + 1) * STEP_SECONDS
        site.paths.step()
    assert site.paths.views()[0].congestion.multiplier > 1


def test_links_of_unknown_rate_do_not_count_for_utilization(site: LinkedWorld) -> None:
    site.register("d2", "west")
    unknown = LinkFigures(AgentName("d2"), 500e6, 0.0, 0.05, 0.05, 1 << 30, 0.0, num_connections=4)
    for second in range(20):
        site.now = second * STEP_SECONDS
        site.report("p1", LINK, unknown)
        site.paths.step()
    (view,) = site.paths.views()
    assert view.congestion.multiplier == 1
    assert view.bytes_per_second == 501e6
    assert view.capacity_bytes_per_second == 510e6, "at least what it carries"
    site.report("p1", unknown)
    assert site.paths.views()[0].capacity_bytes_per_second == 0


def test_forgotten_rate_does_not_raise_the_threshold(site: LinkedWorld) -> None:
    site.register("d2", "west")
    half_full = replace(LINK, bytes_per_second=5e6)
    for capacity in [10e6] * 20 + [0.0] * 20:
        site.now += STEP_SECONDS
        site.report(
            "p1",
            half_full,
            replace(LINK, peer=AgentName("d2"), bytes_per_second=6e6, capacity_bytes_per_second=capacity),
        )
        site.paths.step()
        assert site.paths.views()[0].congestion.multiplier == 1


def test_planned_rate_is_that_of_known_links_for_a_while(site: LinkedWorld) -> None:
    site.register("d2", "west")
    unknown = replace(LINK, peer=AgentName("d2"), capacity_bytes_per_second=0.0)

    def planned(*links: LinkFigures) -> float:
        site.report("p1", *links)
        site.paths.step()
        return site.paths.planned_bytes_per_second("east", "west", within_seconds=50.0)

    assert planned(LINK, unknown) == planned(LINK, replace(unknown, bytes_per_second=3e6)) == 20e6
    site.now += 49.0
    assert planned(unknown) == 20e6
    site.now += 1.0
    assert planned(unknown) == 0.0
    assert planned(LINK) == 10e6
    assert site.paths.planned_bytes_per_second("west", "east", within_seconds=50.0) == 0.0


def _planned(site: LinkedWorld, capacity: float, *, at: float) -> float:
    site.now = at
    site.world.record_report(AgentName("d1"), epoch=1, links=None)
    site.report("p1", replace(LINK, capacity_bytes_per_second=capacity))
    site.paths.step()
    return site.paths.planned_bytes_per_second("east", "west", within_seconds=300.0)


def test_slow_rate_counts_for_less_than_a_minute(site: LinkedWorld) -> None:
    """It knows its rate for half a minute after the last transfer that waited; a manager for another half."""
    assert _planned(site, 10e6, at=10.0) == 10e6
    assert _planned(site, 1e6, at=20.0) == _planned(site, 0.0, at=20.0 + LOW_SECONDS - 1.0) == 1e6
    assert _planned(site, 0.0, at=20.0 + LOW_SECONDS) == _planned(site, 0.0, at=300.0) == 10e6
    assert _planned(site, 0.0, at=310.0) == 1e6, "what it carried before is too long ago"


def test_lasting_slow_rate_is_planned_with(site: LinkedWorld) -> None:
    assert {_planned(site, 1e6 if at % 40 < 30 else 0.0, at=float(at)) for at in range(10, 400)} == {1e6}


def test_round_trip_of_an_idle_path_is_ignored(site: LinkedWorld) -> None:
    multipliers = []
    for used in (0.0, 1e6):
        for _ in range(3):
            site.now += STEP_SECONDS
            site.report("p1", replace(LINK, bytes_per_second=used, rtt_seconds=0.9))
            site.paths.step()
        multipliers.append(site.paths.views()[0].congestion.multiplier)
    assert multipliers == [1.0, 2.0]


def test_each_link_is_compared_with_its_own_round_trip(site: LinkedWorld) -> None:
    site.register("d2", "west")
    multipliers = []
    for seconds in (0.2, 0.9):
        for _ in range(3):
            site.now += STEP_SECONDS
            site.report("p1", LINK, replace(LINK, peer=AgentName("d2"), rtt_seconds=seconds, min_rtt_seconds=0.2))
            site.paths.step()
        multipliers.append(site.paths.views()[0].congestion.multiplier)
    assert multipliers[0] == 1.0 < multipliers[1]


def test_unreported_path_does_not_raise_the_threshold(site: LinkedWorld) -> None:
    def states() -> int:
        clusters = (ClusterName("east"), ClusterName("west"))
        return len(site.paths.states(clusters, threshold_tokens=1000, always_abundant=False))

    site.report("p1", CHOKED)
    site.now = STEP_SECONDS
    site.paths.step()
    assert states() == 1
    site.world.record_report(AgentName("p1"), epoch=1, links=([], []))
    site.paths.step()
    assert states() == 0
