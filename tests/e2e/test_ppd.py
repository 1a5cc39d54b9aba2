"""PPD on real engines: the first turn P→D, later ones by the table; what stays moves no KV, and the tokens are right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.managed import Deployment, prompt_of, running_deployment
from tests.support.waiting import wait_until
from tools.demo.client import Answer, get_json, prefilled_tokens

pytestmark = [pytest.mark.vllm]


def _entry(workload: str, context: str, *, local_ms: float) -> dict[str, Any]:
    cell = {"context_class": context, "workload_type": workload, "qps": 1.0}
    return cell | {"pd_ttft_ms": 100.0, "ppd_ttft_ms": local_ms, "pd_tpot_ms": 10.0, "ppd_tpot_ms": 10.0}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Its table has small turns prefilled where their KV is, and huge ones on the PD-P instance."""
    directory: Path = tmp_path_factory.mktemp("ppd")
    gains = {"small_bal": 50.0, "mid_paste": 50.0, "huge_paste": 200.0}
    entries = [
        _entry(workload, context, local_ms=ms) for workload, ms in gains.items() for context in ("small", "large")
    ]
    table = directory / "table.json"
    table.write_text(json.dumps({"weights": {"w_ttft": 1.0, "w_tpot": 1.0}, "entries": entries}))
    settings = {"local_policy": "ppd", "ppd_table": str(table), "rebalance_bytes_per_second": "0Gbps"}
    with running_deployment(directory, expiry_seconds="60s", manager_settings=settings, one_cluster=True) as running:
        yield running


def _ask(deployment: Deployment, prompt: list[int]) -> tuple[Answer, str]:
    """The answer, once the manager knows what the decode node holds of it; and the decision's reason."""
    before = _sequence(deployment)
    answer = deployment.ask(deployment.router_url, prompt)
    wait_until(lambda: _sequence(deployment) > before, what="the blocks")
    wait_until(deployment.has_healed, what="an index that knows the blocks")
    return answer, answer.headers["x-prfaas-reason"]


def _sequence(deployment: Deployment) -> int:
    return int(get_json(f"{deployment.agents['west'].status_url}/status")["reporting"]["sequence"])


def _await_prefill(engine_url: str, *, beyond: int) -> None:
    """vLLM counts what it loads before what it was given."""
    wait_until(lambda: prefilled_tokens(engine_url) > beyond, what="a prefill")


def _num_arrived(deployment: Deployment) -> int:
    records = get_json(f"{deployment.agents['west'].status_url}/transfers")
    return sum(record["direction"] == "in" and record["outcome"] == "completed" for record in records)


@pytest.mark.timeout(900)
def test_a_conversation_moves_kv_in_its_first_turn_and_where_the_table_says_so(deployment: Deployment) -> None:
    turns = [
        (400, "ppd_first_turn", 1),
        (20, "ppd_table_local", 1),
        (100, "ppd_table_local", 1),
        (600, "ppd_table_pd", 2),
    ]
    prompt: list[int] = []
    for number, (num_new, reason, num_arrived) in enumerate(turns):
        prompt = [*prompt, *prompt_of(num_new, seed=number)]
        computed = prefilled_tokens(deployment.engine_urls["east"])
        answer, why = _ask(deployment, prompt)
        assert why == reason
        assert _num_arrived(deployment) == num_arrived
        if reason == "ppd_table_local":
            assert prefilled_tokens(deployment.engine_urls["east"]) == computed
        else:
            _await_prefill(deployment.engine_urls["east"], beyond=computed)
        assert answer.token_ids == deployment.reference(prompt)
        prompt = [*prompt, *answer.token_ids]
