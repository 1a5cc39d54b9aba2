"""Thresholds at a price of egress: less leaves at higher prices, as long as the rest is sustained."""

from dataclasses import replace

import pytest

from prfaas.model.cost.egress_price import EgressPrice, Period
from prfaas.model.deployment import Deployment
from prfaas.model.planning.egress_threshold import UTILISATION, at_egress_price
from prfaas.model.planning.plan import Plan
from prfaas.model.planning.planner import best_plan
from tests.support.planner_inputs import case_study

DAY = EgressPrice(0.0, (Period(8.0, 20.0, 5.0),))


def _planned(price: EgressPrice, *, rate: float = 0.1, hour: float = 0.0, local: float | None = 12.0) -> Plan:
    deployment, traffic = case_study()
    deployment = _priced(deployment, price, local)
    plan = best_plan(deployment, traffic)
    return at_egress_price(plan, deployment, traffic, hour=hour, requests_per_second=rate)


def _priced(deployment: Deployment, price: EgressPrice, local: float | None) -> Deployment:
    (remote,), (pd,) = deployment.prfaas, deployment.pd
    prfaas = (replace(remote, egress_price=price),)
    return replace(deployment, prfaas=prfaas, pd=(replace(pd, price_per_hour=local),))


def test_less_leaves_as_the_price_rises_until_nothing_leaves() -> None:
    found = [_planned(EgressPrice(price)).offload_ratio for price in (0.0, 0.02, 0.03, 0.05, 0.09)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[2] > 0.0
    assert found[-1] == 0.0


def test_prompt_at_the_threshold_costs_as_much_as_its_local_prefill() -> None:
    deployment, _ = case_study()
    tokens = _planned(EgressPrice(0.03)).threshold_tokens
    assert tokens is not None
    saved = deployment.pd[0].profile.prefill.seconds(tokens) * 12.0 / 3600
    assert saved == pytest.approx(deployment.model.kv_bytes(tokens) / 1e9 * 0.03, rel=0.05)


def test_price_counts_by_the_hour() -> None:
    night, day = (_planned(DAY, hour=hour) for hour in (7.9, 8.0))
    assert night.offload_ratio > 0.0 == day.offload_ratio


def test_load_that_needs_the_prfaas_clusters_still_leaves() -> None:
    free = _planned(EgressPrice(0.0))
    rate = 0.7 * free.system_throughput
    dear = _planned(EgressPrice(5.0), rate=rate)
    assert 0.0 < dear.offload_ratio < free.offload_ratio
    assert dear.system_throughput >= rate / UTILISATION


def test_least_leaves_where_local_instances_have_no_price() -> None:
    assert _planned(EgressPrice(0.001), local=None).offload_ratio == 0.0


def test_overloaded_plan_keeps_its_threshold() -> None:
    assert _planned(EgressPrice(5.0), rate=100.0) == _planned(EgressPrice(0.0))
