"""Prices of egress by the hour in the twin: each request follows the price of its hour."""

from collections import Counter
from dataclasses import replace

from prfaas.model.cost.egress_price import EgressPrice, Period
from prfaas.model.planning.planner import best_plan
from prfaas.scheduler.route import Decision
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.sim.builder import deploy
from prfaas.sim.scenario import Scenario
from prfaas.sim.workload.traffic import draw_requests
from tests.support.planner_inputs import case_study


def test_prompts_leave_while_egress_is_free_and_stay_while_it_is_dear() -> None:
    deployment, traffic = case_study()
    (remote,), (pd,) = deployment.prfaas, deployment.pd
    price = EgressPrice(0.0, (Period(1.0, 2.0, 0.09),))
    deployment = replace(
        deployment, prfaas=(replace(remote, egress_price=price),), pd=(replace(pd, price_per_hour=12.0),)
    )
    plan, rate = best_plan(deployment, traffic), 0.1
    left = Counter[int]()

    def count(_: Snapshot, __: RequestFacts, decision: Decision) -> None:
        if (decision.prefill or "").startswith(remote.name):
            left[int(twin.timeline.now // 3600)] += 1

    twin = deploy(deployment, traffic, plan, Scenario(fidelity="instances"), rate=rate, watch=count)
    twin.run(draw_requests(traffic, "poisson", count=900, rate=rate, seed=0))
    assert left[0] > 50 < left[2]
    assert left[1] == 0
