"""Interaction of the policies over all orders of lengths and t, both bandwidths, every path and every policy."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

import pytest

from prfaas.scheduler.ppd import PpdEntry, PpdTable
from prfaas.scheduler.route import route
from prfaas.scheduler.snapshot import PathState, RequestFacts, Snapshot
from prfaas.types import LocalPolicy
from tests.unit.scheduler.deployment import EAST, EAST_CLUSTER, FAST, PD_P, SLOW, WEST, WEST_CLUSTER, prefix_decider

T = 1000
RAISED = 2 * T  # Threshold of a congested path.
LIMIT = T // 2  # Limit of the suffix decider.
FETCH = T // 4
OUTPUT_TOKENS = 128
CONTEXTS: tuple[Literal["small", "large"], ...] = ("small", "large")
# The table has small contexts prefilled by the decode node and large ones by P, whatever the turn's own lengths.
TABLE = PpdTable(
    tuple(
        PpdEntry(context, workload, 1.0, 0.2, 0.1 if context == "small" else 0.4, 0.010, 0.010)
        for context in CONTEXTS
        for workload in ("mid_bal", "small_bal", "mid_paste", "big_paste", "huge_paste", "short_gen", "tiny")
    )
)
LENGTHS = (1, 2, FETCH, LIMIT, LIMIT + 1, T, T + 1, RAISED, RAISED + 1, 3 * T)
CACHED = (0, 1, FETCH, LIMIT, T, T + FETCH, RAISED)
POLICIES: tuple[LocalPolicy, ...] = ("decode", "pd", "ppd", "static", "endpoint_picker")
Link = Literal["calm", "congested", "slow", "down", "no_instance"]


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    total: int
    pd: int
    prfaas: int
    abundant: bool
    link: Link
    policy: LocalPolicy
    fetches: bool

    def snapshot(self) -> Snapshot:
        instances = (WEST, PD_P) if self.link == "no_instance" else (EAST, WEST, PD_P)
        t = RAISED if self.link == "congested" else T
        cost = SLOW if self.link == "slow" else FAST
        return Snapshot(
            T,
            instances,
            links_down=frozenset([(EAST_CLUSTER, WEST_CLUSTER)] if self.link == "down" else []),
            paths=(PathState(EAST_CLUSTER, WEST_CLUSTER, t, is_abundant=self.abundant, cost=cost),),
            local_policy=self.policy,
            endpoint_picker=prefix_decider(LIMIT),
            ppd_table=TABLE,
            requests_per_second=1.0,
            fetch_tokens=FETCH if self.fetches else 0,
        )

    def facts(self) -> RequestFacts:
        cached = {EAST.agent: self.prfaas, WEST.agent: self.pd}
        return RequestFacts(self.total, cached_tokens=cached, turn=2, max_output_tokens=OUTPUT_TOKENS)


def across(case: Case) -> str | None:
    """Return the reason from the rule for PrfaaS clusters; None for a request below t."""
    uncached, t = case.total - case.pd, RAISED if case.link == "congested" else T
    if case.total < 2 or uncached <= T:
        return None
    if case.link in ("down", "no_instance"):
        return "link_down" if case.link == "down" else "no_prefill_instance"
    if uncached <= t:
        return "congested"
    by_best_cache = case.total - max(case.pd, case.prfaas)
    prefix_decides = case.abundant and by_best_cache <= t
    if prefix_decides and case.fetches and case.prfaas - case.pd >= FETCH:
        return "fetched"
    if case.link == "slow":
        return "link_too_slow"
    return "cached_elsewhere" if prefix_decides else "long"


def inside(case: Case) -> str:
    """Return the reason from the PD cluster's own policy."""
    if case.total < 2:
        return "short"
    match case.policy:
        case "decode":
            return "short"
        case "pd":
            return "pd"
        case "endpoint_picker":
            return "suffix_uncached" if case.total - case.pd >= LIMIT else "suffix_cached"
        case "static":
            return "static_local"  # The decode instance is a replica.
        case "ppd":
            if case.pd == 0:
                return "ppd_first_turn"
            return "ppd_table_local" if case.pd <= 512 else "ppd_table_pd"


def expected(case: Case) -> tuple[str, str]:
    """Return the documented outcome: the PrfaaS rule first, then the policy of the PD cluster."""
    first, then = across(case), inside(case)
    if first in ("long", "cached_elsewhere"):
        return "remote", first
    if first == "fetched":
        return "local", first
    if then in ("pd", "suffix_uncached", "ppd_first_turn", "ppd_table_pd"):
        return "remote", then
    return "local", first if first and then == "short" else then


def _cases(policy: LocalPolicy) -> list[Case]:
    cells = product(LENGTHS, CACHED, CACHED, (False, True), get_args(Link), (False, True))
    return [
        Case(total, pd, prfaas, abundant, link, policy, fetches)
        for total, pd, prfaas, abundant, link, fetches in cells
        if max(pd, prfaas) < total
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_case_follows_the_documented_order(policy: LocalPolicy) -> None:
    wrong = []
    for case in _cases(policy):
        decision = route(case.snapshot(), case.facts())
        if (decision.route, decision.reason) != expected(case):
            wrong.append((case, decision, expected(case)))
    assert not wrong, f"{len(wrong)} cells, the first: {wrong[0]}"


def test_table_contains_every_reason_of_a_healthy_deployment_and_of_bad_paths() -> None:
    counts = Counter(expected(case)[1] for policy in POLICIES for case in _cases(policy))
    assert set(counts) == {
        *("short", "long", "cached_elsewhere", "fetched", "congested", "link_down", "link_too_slow"),
        *("no_prefill_instance", "pd", "suffix_cached", "suffix_uncached"),
        *("ppd_first_turn", "ppd_table_local", "ppd_table_pd", "static_local"),
    }


def test_ppd_with_all_weight_on_tpot_equals_pd_if_local_prefill_costs_tpot() -> None:
    costly = tuple(replace(entry, ppd_tpot_seconds=0.012) for entry in TABLE.entries)
    against = PpdTable(costly, ttft_weight=1.0, tpot_weight=1e9)
    for case in _cases("ppd"):
        pd = route(replace(case, policy="pd").snapshot(), case.facts())
        ppd = route(replace(case.snapshot(), ppd_table=against), case.facts())
        assert (ppd.route, ppd.prefill, ppd.decode) == (pd.route, pd.prefill, pd.decode), case
