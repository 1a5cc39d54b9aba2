"""Unlike PD clusters in the twin: routes of the plan carry what the plan promises."""

from dataclasses import replace

from prfaas.model.planning.planner import best_plan
from prfaas.sim.builder import deploy
from prfaas.sim.scenario import Scenario
from prfaas.sim.workload.traffic import draw_requests
from tests.support.planner_inputs import case_study


def test_requests_queue_little_at_90_percent_of_the_plan_only_on_its_routes() -> None:
    deployment, traffic = case_study()
    (remote,), (local,) = deployment.prfaas, deployment.pd
    clusters = tuple(replace(local, name=name, num_instances=count) for name, count in (("west", 4), ("east", 2)))
    source = replace(remote, num_instances=1, egress_bytes_per_second=4.4e8)
    deployment = replace(deployment, prfaas=(source,), pd=clusters)
    plan = best_plan(deployment, traffic)
    rate = 0.9 * plan.system_throughput
    waits = []
    for followed in (plan, replace(plan, routes=())):
        scenario = Scenario(fidelity="instances", local_policy="pd")
        twin = deploy(deployment, traffic, followed, scenario, rate=rate)
        twin.run(draw_requests(traffic, "poisson", count=6000, rate=rate, seed=1))
        times = sorted(request.first_token - request.arrival for request in twin.requests)
        waits.append(times[len(times) // 2])
    assert waits[0] < 12.0 < 100.0 < waits[1]
