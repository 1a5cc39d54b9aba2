"""Plans from live instances and measured rates, and the threshold of a congested path."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import ConfigError
from prfaas.index.membership import Figures, LinkFigures
from prfaas.manager.daemon import Manager
from prfaas.manager.state.world import OFFLOAD_NOTHING, ThresholdPlan
from prfaas.model.planning.plan import PlannedRoute
from prfaas.model.planning.planner import best_plan
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.reporter import Reporter
from prfaas.solve.files.deployment_file import read_deployment
from prfaas.solve.files.traces import find_trace
from prfaas.types import AgentName
from tests.integration.manager.test_routing import route_request
from tests.support.deployment import Deployment, chain_of
from tests.support.waiting import until

FILE = """
model: internal-1t-hybrid
trace: lognormal
prfaas:
  - {name: prfaas, profile: h200-internal-1t, instances: 9, bandwidth: 100Gbps}
pd:
  - {name: pd, profile: h20-internal-1t, instances: 9}
"""
LINK = LinkFigures(AgentName("d1"), 0.0, 0.0, 0.08, 0.08, 0, 0.0, num_connections=8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "deployment.yaml"
    written.write_text(FILE)
    return written


async def _node(deployment: Deployment, name: str, *managers: Manager, figures: Figures | None = None) -> Reporter:
    """p…: of the PrfaaS cluster; i…: a PD-P instance; d…: a decode instance."""
    kind = {"p": ("prfaas", "prfaas", "prefill"), "i": ("pd", "pd", "prefill"), "d": ("pd", "pd", "decode")}[name[0]]
    return await deployment.node(name, *managers, cluster=kind[0], kind=kind[1], role=kind[2], figures=figures)


async def _settled(manager: Manager, splits: dict[str, tuple[float, float]], num_prfaas: int) -> ThresholdPlan:
    """The plan for so many instances of each role."""

    def fits() -> bool:
        plan = manager.world.plan
        return plan is not None and plan.splits == splits and bool(plan.supplies) == bool(num_prfaas)

    await until(fits, what=f"a plan for {splits}")
    assert manager.world.plan is not None
    return manager.world.plan


async def test_threshold_is_solved_for_live_instances(deployment: Deployment, file: Path) -> None:
    manager = await deployment.start_manager(deployment=file, threshold_tokens=1)
    for name in ("i1", "d1"):
        await _node(deployment, name, manager)
    assert (await _settled(manager, {"pd": (1.0, 1.0)}, 0)).threshold_tokens == OFFLOAD_NOTHING
    await _node(deployment, "p1", manager)
    plan = await _settled(manager, {"pd": (1.0, 1.0)}, 1)
    listed, written = read_deployment(file)
    alive = replace(
        listed,
        prfaas=(replace(listed.prfaas[0], num_instances=1),),
        pd=(replace(listed.pd[0], num_instances=2, num_prefill=1),),
    )
    expected = best_plan(alive, find_trace(written.trace, beside=None))
    assert plan.threshold_tokens == expected.threshold_tokens
    await until(lambda: manager.routing.threshold_tokens == plan.threshold_tokens, what="the plan in force")
    assert plan.inputs["instances"] == "the nodes that are alive"


def _list_rate(file: Path, rate: str) -> None:
    file.write_text(FILE.replace("100Gbps", rate))


@pytest.mark.parametrize(("listed", "measured"), [("100Gbps", 20e6), ("160Mbps", 12.5e9)])
async def test_the_lower_of_the_measured_rate_and_that_of_the_file_counts(
    deployment: Deployment, file: Path, listed: str, measured: float
) -> None:
    _list_rate(file, listed)
    manager = await deployment.start_manager(deployment=file)
    figures = Figures(links=(replace(LINK, capacity_bytes_per_second=measured),))
    await _node(deployment, "p1", manager, figures=figures)
    await _node(deployment, "d1", manager)
    await until(
        lambda: manager.paths.planned_bytes_per_second("prfaas", "pd", within_seconds=60) > 0, what="the link's rate"
    )
    await _node(deployment, "i1", manager)  # A new node makes a new plan due at once.
    await until(lambda: _links_of(manager).startswith("measured: prfaas to pd"), what="a plan with the measured rate")
    await until(
        lambda: manager.routing.threshold_tokens > 60_000, what="the t of 160 Mbit/s: with 100 Gbit/s about 23,000"
    )


def _links_of(manager: Manager) -> str:
    return manager.world.plan.inputs["links"] if manager.world.plan else ""


async def test_recorded_plan_needs_a_deployment(deployment: Deployment, file: Path) -> None:
    await deployment.start_redis()
    first = await deployment.start_manager(deployment=file, name="m1")
    for name in ("p1", "i1", "d1"):
        await _node(deployment, name, first)
    await _settled(first, {"pd": (1.0, 1.0)}, 1)
    second = await deployment.start_manager(deployment=file, name="m2")
    await until(lambda: second.world.plan is not None, what="the plan in the record")
    without = await deployment.start_manager(threshold_tokens=77)  # It has read the record once it has started.
    assert without.world.plan is None and without.routing.threshold_tokens == 77


async def test_unusable_deployment_file_stops_the_start(deployment: Deployment, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        Manager(deployment.config(deployment=tmp_path / "absent.yaml", redis_url="redis://127.0.0.1:1"), bytes(32))
    with pytest.raises(ValueError, match="deployment: missing"):
        deployment.config(bandwidth="measured")


async def _asked(deployment: Deployment, figures: Figures, settings: dict[str, Any]) -> tuple[Manager, ManagerClient]:
    manager = await deployment.start_manager(**settings)
    await _node(deployment, "p1", manager, figures=figures)
    await _node(deployment, "d1", manager)
    await until(lambda: any(path.pressures for path in manager.paths.views()), what="the link's figures")
    return manager, deployment.client(manager)


async def test_congestion_raises_the_threshold_with_its_reason(deployment: Deployment) -> None:
    queue = Figures(links=(replace(LINK, capacity_bytes_per_second=1e6, queued_bytes=5_000_000),))
    _, client = await _asked(deployment, queue, {"threshold_tokens": 900})
    assert (await client.route(route_request(chain_of(1000)))).reason == "congested"
    assert (await client.route(route_request(chain_of(800)))).reason == "short"


async def test_request_stays_if_the_link_is_slower_than_local_prefill(deployment: Deployment, file: Path) -> None:
    snail = Figures(links=(replace(LINK, capacity_bytes_per_second=1e3),))
    manager, client = await _asked(deployment, snail, {"deployment": file, "threshold_tokens": 500})
    manager.world.plan = None
    assert (await client.route(route_request(chain_of(1000)))).reason == "link_too_slow"


async def test_routers_ask_about_every_prompt_of_a_plan_with_routes(deployment: Deployment, file: Path) -> None:
    manager, _ = await _asked(deployment, Figures(links=(LINK,)), {"deployment": file})
    await until(lambda: manager.world.plan is not None, what="the plan")
    plan = manager.world.plan
    assert plan is not None
    assert manager.service.state(index_stale=False).local_policy == "decode"
    manager.world.plan = replace(plan, routes=(PlannedRoute(frozenset(), 0, 1000, "west", None, 1.0),))
    assert ThresholdPlan.from_json(manager.world.plan.to_json()) == manager.world.plan
    assert manager.service.state(index_stale=False).local_policy == "routes"
