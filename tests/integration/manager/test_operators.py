"""Changes of a deployment: only operators may make them, and every attempt is logged and counted."""

from typing import Any, get_args

import pytest
from prometheus_client import REGISTRY

from prfaas.errors import IndexRefusal
from prfaas.manager.operations.operations import Action
from prfaas.rpc.generated import manager_pb2 as pb
from tests.support.deployment import Deployment
from tests.support.waiting import PATIENCE_SECONDS, until

CALLS: dict[str, tuple[str, Any, str]] = {
    "drain": ("Drain", pb.DrainRequest(node="n1"), "num_requests_left=0 num_engines_unknown=1"),
    "undrain": ("Undrain", pb.UndrainRequest(node="n1"), ""),
    "set_role": ("SetRole", pb.SetRoleRequest(node="n1", role="prefill"), "role=prefill num_requests_left=0"),
}


def test_all_actions_are_covered() -> None:
    assert set(CALLS) == set(get_args(Action))


@pytest.mark.parametrize("action", CALLS)
async def test_action_needs_an_operator_and_is_logged(
    deployment: Deployment, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = await deployment.start_manager(operators=("night-shift",))
    for name in ("n1", "n2"):
        deployment.run(deployment.reporter(name, manager))
    await until(lambda: len(manager.world.live()) == 2, what="both nodes")
    method, request, found = CALLS[action]
    before = {outcome: _count(action, outcome) for outcome in ("refused", "done")}
    with caplog.at_level("INFO"):
        for stranger in ("router", "operator", "n1") if action != "drain" else ("router", "operator", "n2"):
            with pytest.raises(IndexRefusal, match=f"{stranger} is not an operator"):
                await deployment.client(manager, name=stranger, deadline_seconds=PATIENCE_SECONDS).operate(
                    method, request
                )
            assert f"admin.action_ended who={stranger} action={action} target=n1 outcome=refused" in caplog.text
        assert "admin.action_started" not in caplog.text
        client = deployment.client(manager, name="night-shift", deadline_seconds=PATIENCE_SECONDS)
        await client.operate(method, request)
    assert f"admin.action_started who=night-shift action={action} target=n1" in caplog.text
    lines = [
        line for line in caplog.text.splitlines() if f"who=night-shift action={action} target=n1 outcome=done" in line
    ]
    assert len(lines) == 1 and found in lines[0]
    assert (_count(action, "refused"), _count(action, "done")) == (before["refused"] + 3, before["done"] + 1)


def _count(action: str, outcome: str) -> float:
    labels = {"action": action, "outcome": outcome}
    return REGISTRY.get_sample_value("prfaas_manager_admin_actions_total", labels) or 0.0
