"""Real engines with NixlConnector and PrfaasConnector under MultiConnector.

NixlConnector transfers within the cluster (`pd_protocol: nixl`), PrfaasConnector what carries a grant. Needs NIXL
(`pip install --no-deps nixl nixl-cu12`), but no GPU.
"""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_deployment import CHUNK_TOKENS, PATIENT, random_prompt
from tests.support.engine_pair import flags
from tests.support.waiting import wait_until
from tools.demo.client import Answer, complete, get_json, get_text, prefilled_tokens, transfers
from tools.free_ports import HOST, free_address
from tools.processes import Children
from tools.stack import AgentProcess, EngineProcess, Stack
from tools.tiny_models import make_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs NIXL"),
]
MULTI = ("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", "MultiConnector")
# Full attention with recurrent states, sliding windows.
FAMILIES = ("granite4h", pytest.param("gemma3", marks=pytest.mark.soak))
LENGTHS = (CHUNK_TOKENS + 1, 4 * CHUNK_TOKENS + 1, 700)


@dataclass
class Cluster:
    """Prefill and decode instance of one PD cluster behind routers, each with both connectors."""

    family: str
    agents: list[AgentProcess]
    prefill: EngineProcess
    decode: EngineProcess
    router_url: str
    granting_url: str  # Router whose legs carry grants.

    @property
    def engines(self) -> tuple[EngineProcess, EngineProcess]:
        return self.prefill, self.decode

    def ask(self, url: str, prompt: list[int], **more: Any) -> Answer:
        body = {"model": self.family, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return complete(url, body | more)


@pytest.fixture(scope="module", params=FAMILIES)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    family, directory = request.param, tmp_path_factory.mktemp("nixl")
    model = make_model(family, directory / family)
    with Children(directory) as children:
        stack = Stack(children, directory)
        agents = [stack.start_agent(name) for name in ("prefill", "decode")]
        for agent in agents:
            stack.await_agent(agent)
        prefill, decode = (_start(stack, agent, model) for agent in agents)
        for engine in (prefill, decode):
            stack.await_server(engine.child, engine.url)
        instances = [
            {"name": f"{role}/0", "url": engine.url, "role": role, "agent": agent.name, "wire": agent.wire}
            for role, engine, agent in zip(("prefill", "decode"), (prefill, decode), agents, strict=True)
        ]
        west = {"name": "west", "kind": "pd", "instances": instances}
        urls = [_start_router(stack, west, protocol) for protocol in ("nixl", "prfaas")]
        yield Cluster(family, agents, prefill, decode, *urls)


def _start_router(stack: Stack, cluster: dict[str, Any], protocol: str) -> str:
    config = {"clusters": [cluster], "local_policy": "pd", "pd_protocol": protocol}
    router, url = stack.start_router(config, name=f"router-{protocol}")
    stack.await_server(router, url)
    wait_until(lambda: all(get_json(f"{url}/health")["instances"].values()), what="known engines")
    return url


def _start(stack: Stack, agent: AgentProcess, model: Path) -> EngineProcess:
    prfaas = {
        "kv_connector": "PrfaasConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"agent_socket": str(agent.socket), "reuse": False} | PATIENT,
    }
    side_port = free_address().rpartition(":")[2]
    return stack.start_engine(
        agent.name,
        model,
        agent=agent,
        role="kv_both",
        extra=flags(model.name),
        connector={"connectors": [prfaas, {"kv_connector": "NixlConnector", "kv_role": "kv_both"}]},
        connector_class=MULTI,
        environment={"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": side_port, "UCX_TLS": "tcp"},
    )


def test_tokens_equal_those_of_one_engine_with_kv_from_nixl(cluster: Cluster) -> None:
    for length in LENGTHS:
        prompt = random_prompt(length, seed=length)
        alone = cluster.ask(cluster.decode.url, prompt, cache_salt=os.urandom(8).hex())
        computed = [prefilled_tokens(engine.url) for engine in cluster.engines]
        answer = cluster.ask(cluster.router_url, prompt)
        assert (answer.headers["x-prfaas-route"], answer.headers["x-prfaas-reason"]) == ("remote", "pd")
        assert "x-prfaas-fallback" not in answer.headers
        assert answer.token_ids == alone.token_ids, length
        prefill, decode = (
            prefilled_tokens(engine.url) - before for engine, before in zip(cluster.engines, computed, strict=True)
        )
        assert prefill >= length - 1 and decode <= 1
    wait_until(lambda: _num_nixl_transfers(cluster.decode) == len(LENGTHS), what="NIXL's own count")
    assert [transfers(agent.status_url) for agent in cluster.agents] == [{}, {}]


def test_requests_with_a_grant_use_prfaas(cluster: Cluster) -> None:
    pulled = _num_nixl_transfers(cluster.decode)
    for length in LENGTHS:
        prompt = random_prompt(length, seed=1000 + length)
        alone = cluster.ask(cluster.decode.url, prompt, cache_salt=os.urandom(8).hex())
        answer = cluster.ask(cluster.granting_url, prompt)
        assert answer.headers["x-prfaas-route"] == "remote" and "x-prfaas-fallback" not in answer.headers
        assert answer.token_ids == alone.token_ids, length
    wait_until(lambda: _outcomes(cluster) == [["completed"] * len(LENGTHS)] * 2, what="both ends of each transfer")
    assert _num_nixl_transfers(cluster.decode) == pulled


def _outcomes(cluster: Cluster) -> list[list[str]]:
    return [[transfer["outcome"] for transfer in transfers(agent.status_url).values()] for agent in cluster.agents]


def test_nixl_ignores_a_granted_leg_without_a_transfer(cluster: Cluster) -> None:
    prompt = random_prompt(2 * CHUNK_TOKENS, seed=71)
    alone = cluster.ask(cluster.decode.url, prompt, cache_salt=os.urandom(8).hex())
    for direction, engine in (("do_remote_prefill", cluster.decode), ("do_remote_decode", cluster.prefill)):
        granted = {direction: True, "prfaas_grant": "no grant"}
        answer = cluster.ask(engine.url, prompt, kv_transfer_params=granted, cache_salt=os.urandom(8).hex())
        assert answer.token_ids == alone.token_ids, direction
    through = cluster.ask(cluster.router_url, random_prompt(2 * CHUNK_TOKENS, seed=72))
    assert through.headers["x-prfaas-route"] == "remote" and "x-prfaas-fallback" not in through.headers


def _num_nixl_transfers(engine: EngineProcess) -> int:
    """Return the number of transfers that NIXL has pulled into an engine."""
    lines = get_text(f"{engine.url}/metrics").splitlines()
    return int(
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:nixl_xfer_time_seconds_count"))
    )
