"""Role change under load: an instance drains and takes the other role, and no request fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.control.shifted_mix import NUM_CLIENTS, ROLES, load, num_changes, plan_of, running_cluster
from tests.support.process_deployment import ProcessDeployment
from tests.support.waiting import until
from tools.demo.client import get_json


@pytest.fixture(params=["apply", pytest.param("recommend", marks=pytest.mark.soak)])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ProcessDeployment]:
    with running_cluster(tmp_path, role_changes=request.param) as made:
        yield made


def _roles(site: ProcessDeployment) -> list[str]:
    nodes = get_json(f"{site.manager_url}/state")["nodes"]
    return sorted(engine["role"] for node in nodes for engine in node["node"]["engines"])


@pytest.mark.timeout(400)
async def test_prefill_instance_becomes_decode_and_no_request_fails(
    site: ProcessDeployment, request: pytest.FixtureRequest
) -> None:
    applies = "apply" in request.node.name
    await until(lambda: plan_of(site).get("splits") == {"west": [2.0, 2.0]}, seconds=90, what="the file's plan")
    assert plan_of(site)["best_splits"] == {"west": [2.0, 2.0]}, "for the file's trace the split is right"
    async with load(site) as outcomes:
        wanted = "done" if applies else "recommended"
        await until(lambda: num_changes(site, wanted) == 1, seconds=90, what=f"a change that is {wanted}")
        before = len(outcomes)
        await until(lambda: len(outcomes) > before + 2 * NUM_CLIENTS, seconds=90, what="answers afterwards")
        if applies:
            await until(
                lambda: plan_of(site)["splits"] == {"west": [1.0, 3.0]}, seconds=90, what="the plan's new split"
            )
            assert plan_of(site)["best_splits"] == {"west": [1.0, 3.0]}
    plan = plan_of(site)
    assert [outcome for outcome in outcomes if not outcome.is_whole] == []
    assert {outcome.reason for outcome in outcomes} == {"pd"}
    assert plan["inputs"]["lengths"].startswith("measured: ")
    assert _roles(site) == (["decode"] * 3 + ["prefill"] if applies else sorted(ROLES))
    assert num_changes(site, "done") == (1 if applies else 0)
    turned = [name for name in ("w0/0", "w1/0") if site.transfers(name)["right"]]
    assert len(turned) == (1 if applies else 0), "the instance that turned has taken KV from the other"
    if applies:
        assert plan["roles"] == {turned[0]: "decode"} and not plan["draining"]
        assert '"num_requests_left": 0' in site.manager.log.read_text(), "it was drained before"
