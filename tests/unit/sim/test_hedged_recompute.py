"""Decode instances of the twin compute a prompt themselves when its KV would come too late."""

import pytest

from prfaas.sim.builder import deploy
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.run import prepare, traffic
from prfaas.sim.scenario import Scenario


def _requests(link_changes: str, *, hedge: bool) -> list[SimulatedRequest]:
    """Run the case study at 1 request per second; nobody else notices a link that is down."""
    setup = prepare(Scenario())
    scenario = Scenario(fidelity="instances", layers=32, link_changes=link_changes, hedge=hedge, heartbeats=3600.0)
    twin = deploy(setup.deployment, setup.workload, setup.plan, scenario)
    twin.run(traffic(Scenario(requests=200), setup, 1.0))
    return twin.requests


def _mean_ttft(requests: list[SimulatedRequest]) -> float:
    return sum(request.first_token - request.arrival for request in requests) / len(requests)


def test_a_working_link_needs_few_recomputes() -> None:
    """A few prompts wait in a long queue at their prefill instance."""
    plain, hedged = (_requests("", hedge=hedge) for hedge in (False, True))
    assert sum(request.num_retries for request in hedged) <= len(hedged) / 20
    assert _mean_ttft(hedged) <= _mean_ttft(plain) * 1.01


@pytest.mark.parametrize("share", ["0%", "1%"])
def test_a_link_that_fails_for_two_minutes_delays_requests_less_with_recomputes(share: str) -> None:
    changes = f"h200@30s={share}+2m"
    plain, hedged = (_requests(changes, hedge=hedge) for hedge in (False, True))
    assert len({request.index for request in hedged}) == len(hedged) == 200
    assert all(request.decode_end > request.first_token > request.arrival for request in hedged)
    assert any(request.num_retries for request in hedged)
    assert _mean_ttft(hedged) < 0.5 * _mean_ttft(plain)
