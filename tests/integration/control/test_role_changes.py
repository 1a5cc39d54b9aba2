"""The traffic is another than the split was made for: one instance is drained, takes the other role, and nobody notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prfaas.types import InstanceRole
from tests.integration.control.site import Outcome, Site, ask, client, fresh_prompt, running_pd_cluster
from tests.waiting import until
from tools.demo.client import get_json, get_text

PREFILL_SECONDS_PER_TOKEN, TOKEN_SECONDS, SLOTS = 4e-4, 0.02, 4
PROMPT_TOKENS, ANSWER_TOKENS = 125, 60  # 20 prefills a second an instance, 3.3 answers: the file says 5 and 5
PROFILE = f"""
name: paced
hardware: none
source: what the engines are told
prefill: {{fit: coefficients, seconds_per_token: {PREFILL_SECONDS_PER_TOKEN}, seconds: 1.0e-6, min_tokens: 1, max_tokens: 4096}}
decode: {{points: [{{batch: 1, step: {TOKEN_SECONDS}}}, {{batch: {SLOTS}, step: {TOKEN_SECONDS}}}]}}
"""
FILE = """
model: internal-1t-hybrid
trace: "lognormal:mu=6.2,sigma=0.01,min=480,max=520,output=40"
pd:
  - {name: west, profile: paced.yaml, instances: 4}
"""
SETTINGS = {
    "local_policy": "pd",
    "plan_seconds": "2s",
    "traffic_seconds": "30s",
    "role_change_seconds": "3s",
    "rebalance_bytes_per_second": "0Gbps",
}
FLAGS = (
    *("--prefill-seconds", "0", "--prefill-seconds-per-token", str(PREFILL_SECONDS_PER_TOKEN)),
    *("--token-seconds", str(TOKEN_SECONDS), "--decode-slots", str(SLOTS), "--bytes-per-token", "64"),
)
NUM_CLIENTS = 16  # twice what the decode instances answer at once
ROLES: tuple[InstanceRole, ...] = ("prefill", "prefill", "decode", "decode")


@pytest.fixture(params=["apply", "recommend"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    (tmp_path / "paced.yaml").write_text(PROFILE)
    (tmp_path / "deployment.yaml").write_text(FILE)
    settings: dict[str, Any] = SETTINGS | {
        "deployment": str(tmp_path / "deployment.yaml"),
        "role_changes": request.param,
    }
    with running_pd_cluster(tmp_path, ROLES, engine_flags=FLAGS, **settings) as made:
        yield made


@asynccontextmanager
async def _load(site: Site) -> AsyncIterator[list[Outcome]]:
    """Clients that ask again as soon as they are answered; all have been when the block ends."""
    outcomes: list[Outcome] = []
    stopping = asyncio.Event()

    async def asks() -> None:
        async with client() as session:
            while not stopping.is_set():
                prompt = fresh_prompt(PROMPT_TOKENS)
                outcomes.append(await ask(session, site.router_url, prompt, num_tokens=ANSWER_TOKENS))

    asking = [asyncio.create_task(asks()) for _ in range(NUM_CLIENTS)]
    try:
        yield outcomes
    finally:
        stopping.set()
        await asyncio.gather(*asking)


def _plan(site: Site) -> dict[str, Any]:
    return get_json(f"{site.manager_url}/plan")["plan"] or {}


def _num_changes(site: Site, outcome: str) -> float:
    lines = get_text(f"{site.manager_url}/metrics").splitlines()
    ours = (line for line in lines if line.startswith("prfaas_manager_role_changes_total") and outcome in line)
    return sum(float(line.rpartition(" ")[2]) for line in ours)


def _roles(site: Site) -> list[str]:
    nodes = get_json(f"{site.manager_url}/state")["nodes"]
    return sorted(engine["role"] for node in nodes for engine in node["node"]["engines"])


@pytest.mark.timeout(180)
async def test_one_prefill_instance_turns_to_decode_and_no_request_fails(
    site: Site, request: pytest.FixtureRequest
) -> None:
    applies = "apply" in request.node.name
    await until(lambda: _plan(site).get("splits") == {"west": [2.0, 2.0]}, seconds=30, what="the file's plan")
    assert _plan(site)["best_splits"] == {"west": [2.0, 2.0]}, "for the file's trace the split is right"
    async with _load(site) as outcomes:
        wanted = "done" if applies else "recommended"
        await until(lambda: _num_changes(site, wanted) == 1, seconds=90, what=f"a change that is {wanted}")
        before = len(outcomes)
        await until(lambda: len(outcomes) > before + 2 * NUM_CLIENTS, seconds=60, what="answers afterwards")
        if applies:
            await until(lambda: _plan(site)["splits"] == {"west": [1.0, 3.0]}, seconds=30, what="the plan's new split")
            assert _plan(site)["best_splits"] == {"west": [1.0, 3.0]}
    plan = _plan(site)
    assert [its for its in outcomes if not its.is_whole] == []
    assert {its.reason for its in outcomes} == {"pd"}
    assert plan["inputs"]["lengths"].startswith("measured: ")
    assert _roles(site) == (["decode"] * 3 + ["prefill"] if applies else sorted(ROLES))
    assert _num_changes(site, "done") == (1 if applies else 0)
    turned = [name for name in ("w0/0", "w1/0") if site.transfers(name)["right"]]
    assert len(turned) == (1 if applies else 0), "the instance that turned has taken KV from the other"
    if applies:
        assert plan["roles"] == {turned[0]: "decode"} and not plan["draining"]
        assert '"num_requests_left": 0' in site.manager.log.read_text(), "it was drained before"
