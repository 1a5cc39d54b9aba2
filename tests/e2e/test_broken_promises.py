"""What the index promised is gone when the engine looks: that costs a recompute, which is counted, and no wrong token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.managed import Deployment, prompt_of, running_deployment
from tests.support.waiting import wait_until
from tools.demo.client import get_text

pytestmark = [pytest.mark.vllm]
NUM_OTHERS = 12  # prompts whose blocks push everything else out of a pool of 8 MiB


@pytest.mark.soak  # two engines start for it
@pytest.mark.timeout(900)
def test_blocks_evicted_between_the_decision_and_their_use_cost_a_counted_recompute(tmp_path: Path) -> None:
    with running_deployment(tmp_path, expiry_seconds="300s", pool_bytes="8MiB") as deployment:
        known = prompt_of(513, seed=1)
        deployment.ask(deployment.router_url, known)
        wait_until(deployment.has_healed, what="an index that knows the blocks")
        deployment.reports.cut_after(0)  # what the agents evict from here on, the manager does not hear of
        _evict_everything(deployment)
        here, there = known + prompt_of(100, seed=2), known + prompt_of(400, seed=3)
        for prompt, route in ((here, "local"), (there, "remote")):
            answer = deployment.ask(deployment.router_url, prompt)
            assert (answer.headers["x-prfaas-route"], answer.headers["x-prfaas-cached-tokens"]) == (route, "512")
            assert answer.token_ids == deployment.reference(prompt)
        deployment.reports.restore()
        wait_until(lambda: _promises(deployment, "broken") == 2, what="the report of broken promises")
        assert _promises(deployment, "kept") == 0
        wait_until(deployment.has_healed, what="an index that knows the present blocks")


def _evict_everything(deployment: Deployment) -> None:
    for url in deployment.engine_urls.values():
        for number in range(NUM_OTHERS):
            deployment.ask(url, prompt_of(513, seed=100 + number))


def _promises(deployment: Deployment, outcome: str) -> float:
    """Over both clusters."""
    lines = get_text(f"{deployment.manager_url}/metrics").splitlines()
    named = [line for line in lines if line.startswith("prfaas_manager_promises_total{") and f'"{outcome}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in named)
