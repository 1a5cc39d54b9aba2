"""An executor that gives up, because what it runs keeps dying: nobody waits on, neither streams nor requests at the pool."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from prometheus_client import REGISTRY

from prfaas import grants
from prfaas.colocate.config import ColocateConfig
from prfaas.colocate.processes.supervisor import ExecutorFailed, Supervisor
from prfaas.colocate.server import Application, executor_settings
from prfaas.grants import Grant
from prfaas.hashing import HashChain, root_hash
from prfaas.types import AgentName, TransferId
from prfaas.units import split_address
from tests.integration.colocate.states import Hold, pid_of
from tests.support.waiting import PATIENCE_SECONDS, until
from tools.demo.client import get_json
from tools.free_ports import free_address
from tools.processes import Children
from tools.stack import AgentProcess, Stack

PROMPT = tuple(range(40))


@dataclass
class Doomed:
    """An executor that takes one death, at an agent of its own, behind HTTP."""

    executor: Supervisor
    agent: AgentProcess
    key: bytes
    http: aiohttp.ClientSession

    def awaiting_kv(self) -> dict[str, object]:
        """Parameters of a request whose KV is promised, and never sent."""
        tokens = PROMPT[:-1]
        grant = Grant(
            transfer_id=TransferId(os.urandom(16)),
            source=AgentName("nobody"),
            destination=AgentName(self.agent.name),
            destination_address=self.agent.wire,
            prompt_hash=HashChain(root_hash("prfaas-hybrid"), tokens).at(len(tokens)),
            num_tokens=len(tokens),
            max_bytes=1 << 28,
            tenant="",
            expires_at=time.time() + 600.0,
        )
        return {"do_remote_prefill": True, "prfaas_grant": grants.to_text(grants.sign(grant, self.key))}


@pytest_asyncio.fixture
async def doomed(tmp_path: Path) -> AsyncIterator[Doomed]:
    with Children(tmp_path) as children:
        stack = Stack(children, tmp_path)
        agent = stack.start_agent("west", pool_bytes="64MiB", open_timeout_seconds="600s")
        stack.await_agent(agent)
        config = ColocateConfig(listen=free_address(), shape="tiny", dtype="float64", num_blocks=100, max_tokens=600)
        settings = executor_settings(replace(config, num_threads=1, agent_socket=agent.socket))
        async with Supervisor(replace(settings, max_deaths=1)) as executor:
            runner = web.AppRunner(Application(config, executor).routes())
            await runner.setup()
            await web.TCPSite(runner, *split_address(config.listen)).start()
            async with aiohttp.ClientSession(base_url=f"http://{config.listen}") as http:
                yield Doomed(executor, agent, grants.derive_key(stack.secret_file.read_bytes(), "grant"), http)
            await runner.cleanup()


async def events_of(http: aiohttp.ClientSession) -> list[str]:
    async with http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 500, "stream": True}) as response:
        return [line.decode().strip() async for line in response.content if line.strip()]


def num_failed() -> float:
    return REGISTRY.get_sample_value("prfaas_colocate_requests_total", {"outcome": "failed"}) or 0.0


async def test_nobody_waits_for_an_executor_that_has_given_up(doomed: Doomed) -> None:
    executor, failed_before = doomed.executor, num_failed()
    await until(lambda: executor.is_alive, what="both sides", seconds=150)
    generating = executor.generate(PROMPT, 5, parameters=doomed.awaiting_kv())
    waiting = asyncio.ensure_future(anext(generating))
    await until(lambda: get_json(f"{doomed.agent.status_url}/status")["receiving"] == 1, what="the claim")
    with Hold(executor) as hold:
        hold.stop("decode")
        streaming = asyncio.ensure_future(events_of(doomed.http))
        await until(lambda: executor.status()["live_requests"] == 1, what="the stream")
        forkserver = executor.status()["forkserver"]
        os.kill(forkserver, signal.SIGKILL)  # type: ignore[arg-type]
        await until(lambda: executor.status()["forkserver"] != forkserver, what="another fork server")
        async with doomed.http.get("/healthz") as response:
            assert response.status == 200, "one death is one too few"
        os.kill(pid_of(executor, "decode"), signal.SIGKILL)
        events = await streaming
    assert "error" in json.loads(events[-2].removeprefix("data: ")) and events[-1] == "data: [DONE]"
    await until(lambda: num_failed() == failed_before + 1, what="the count")
    async with doomed.http.get("/healthz") as response:
        assert response.status == 503
    doomed.agent.child.process.kill()  # The waiting request learns that its KV will not come.
    with pytest.raises(ExecutorFailed):
        await asyncio.wait_for(waiting, PATIENCE_SECONDS)
    with pytest.raises(ExecutorFailed):
        await anext(executor.generate(PROMPT, 5))
