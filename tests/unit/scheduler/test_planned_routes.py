"""Routes by length and tenant that a plan prescribes."""

from collections import Counter
from dataclasses import replace

import pytest

from prfaas.model.planning.plan import PlannedRoute
from prfaas.scheduler.route import route
from prfaas.scheduler.snapshot import PathState, RequestFacts, Snapshot
from prfaas.types import ClusterName
from tests.unit.scheduler.deployment import EAST, EAST_CLUSTER, WEST, T, instance

NORTH_CLUSTER = ClusterName("north")
NORTH = instance("n", "pd", "both", cluster=NORTH_CLUSTER)
ANYBODY, TENANT = frozenset[str](), frozenset({NORTH_CLUSTER, EAST_CLUSTER})
ROUTES = (
    PlannedRoute(ANYBODY, 0, T, NORTH_CLUSTER, None, 0.25),
    PlannedRoute(ANYBODY, 0, T, WEST.cluster, None, 0.5),
    PlannedRoute(ANYBODY, T, 9 * T, WEST.cluster, EAST_CLUSTER, 0.1),
    PlannedRoute(TENANT, 0, 9 * T, NORTH_CLUSTER, None, 0.15),
)
SNAPSHOT = Snapshot(T, (EAST, WEST, NORTH), routes=ROUTES)
PATH = PathState(EAST_CLUSTER, WEST.cluster, T)
SHORT, LONG = RequestFacts(T), RequestFacts(2 * T)


def test_requests_of_equal_length_are_divided_by_the_shares() -> None:
    decodes = Counter(route(SNAPSHOT, replace(SHORT, seed=seed)).decode for seed in range(1, 3001))
    assert decodes[NORTH.instance] / 3000 == pytest.approx(1 / 3, abs=0.03)
    assert decodes.total() == decodes[NORTH.instance] + decodes[WEST.instance]


def test_long_requests_decode_where_the_plan_sends_them_whatever_the_load() -> None:
    busy = replace(SNAPSHOT, instances=(EAST, replace(WEST, num_requests=9), NORTH))
    for seed in range(1, 50):
        decision = route(busy, replace(LONG, seed=seed))
        assert (decision.decode, decision.prefill) == (WEST.instance, EAST.instance)


def test_tenant_takes_its_own_routes() -> None:
    decision = route(SNAPSHOT, replace(LONG, clusters=TENANT))
    assert (decision.route, decision.decode) == ("local", NORTH.instance)


def test_congestion_keeps_planned_requests_at_home() -> None:
    congested = replace(SNAPSHOT, paths=(replace(PATH, threshold_tokens=4 * T),))
    assert route(congested, LONG).reason == "congested"
    assert route(congested, replace(LONG, num_prompt_tokens=5 * T)).reason == "long"


@pytest.mark.parametrize(
    "snapshot",
    [
        replace(SNAPSHOT, links_down=frozenset({(EAST_CLUSTER, WEST.cluster)})),
        replace(SNAPSHOT, instances=(replace(EAST, healthy=False), WEST, NORTH)),
        replace(SNAPSHOT, instances=(EAST, replace(WEST, healthy=False), NORTH)),
    ],
)
def test_routes_that_cannot_be_taken_leave_the_choice_to_the_other_rules(snapshot: Snapshot) -> None:
    decision = route(snapshot, LONG)
    assert decision.decode is not None
    assert decision == route(replace(snapshot, routes=()), LONG)


def test_prompts_with_cached_tokens_go_to_their_node() -> None:
    cached = replace(LONG, cached_tokens={NORTH.agent: 2 * T - 1})
    assert route(SNAPSHOT, cached).decode == NORTH.instance
