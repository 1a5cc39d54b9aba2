"""Real engines of which only EngineCore is frozen: their API servers go on, but no request waits for them for long."""

import http.client
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prfaas.connector.vllm.health import with_children
from tests.support.engine_deployment import random_prompt
from tests.support.engine_pair import ACROSS_CLUSTERS, EnginePair
from tests.support.paused_process import paused
from tests.support.waiting import wait_until
from tools.demo.client import REQUEST_SECONDS, Answer, get_json
from tools.stack import EngineProcess

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("pair", ["granite4h"], indirect=True),
]
# The connectors of these engines are patient, so the agent's `open_timeout_seconds` (5 s) ends the wait. With the default
# `silence_seconds` the decode engine computes the prompt after 2 s.
MAX_ADDED_SECONDS = 6.0
MAX_STREAM_SECONDS = 40.0


def _core(engine: EngineProcess) -> int:
    """Return the process id of an engine's EngineCore, which computes in a process of its own."""
    api_server, *children = with_children(engine.child.process.pid)
    cores = [child for child in children if b"EngineCore" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert len(cores) == 1, (api_server, children)
    return cores[0]


def _router_settings(pair: EnginePair, *, has_manager: bool) -> dict[str, Any]:
    if has_manager:
        return {"managers": [pair.manager_address], "cluster": "west", "manager_timeout": "10s"}
    clusters = [
        {
            "name": node.cluster,
            "kind": node.kind,
            "instances": [
                {
                    "name": f"{name}/0",
                    "url": pair.engines[name].url,
                    "role": node.role,
                    "agent": name,
                    "wire": pair.agents[name].wire,
                }
            ],
        }
        for name, node in ACROSS_CLUSTERS.items()
    ]
    return {"clusters": clusters, "threshold_tokens": 256}


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.soak)], ids=["with manager", "without manager"])
def router_url(pair: EnginePair, request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the URL of a router with the usual patience."""
    pair.configure(ACROSS_CLUSTERS, manager={"threshold_tokens": 256})
    settings = _router_settings(pair, has_manager=request.param)
    child, url = pair.stack.start_router(settings, name="patient-router")
    pair.stack.await_server(child, url)
    wait_until(lambda: _healthy(url) == {"east/0", "west/0"}, what="a router that knows both engines")
    yield url
    pair.children.stop_child(child)


def _healthy(url: str) -> set[str]:
    return {name for name, is_healthy in get_json(f"{url}/health")["instances"].items() if is_healthy}


def _timed(pair: EnginePair, url: str, prompt: list[int]) -> tuple[Answer, float]:
    started = time.monotonic()
    return pair.ask(url, prompt), time.monotonic() - started


def test_a_request_waits_seconds_for_a_prefill_engine_whose_core_is_frozen(pair: EnginePair, router_url: str) -> None:
    prompts = [random_prompt(1025, seed=900 + number) for number in range(4)]
    expected = [pair.reference(prompt) for prompt in prompts]
    warm, usual_seconds = _timed(pair, router_url, prompts[0])
    assert (warm.token_ids, warm.headers["x-prfaas-route"]) == (expected[0], "remote")
    with ThreadPoolExecutor(2) as pool, paused(_core(pair.prefill)):
        asked = [pool.submit(_timed, pair, router_url, prompt) for prompt in prompts[1:3]]
        answers = [future.result() for future in asked]
        wait_until(lambda: _healthy(router_url) == {"west/0"}, what="the silent engine")
        answers.append(_timed(pair, router_url, prompts[3]))
    added = [seconds - usual_seconds for _, seconds in answers]
    sys.stdout.write(f"\nadded: {', '.join(f'{seconds:.2f} s' for seconds in added)}, usual {usual_seconds:.2f} s\n")
    assert [answer.token_ids for answer, _ in answers] == expected[1:]
    assert answers[-1][0].headers["x-prfaas-route"] == "local"
    assert max(added) < MAX_ADDED_SECONDS and added[-1] < 1.0
    wait_until(lambda: _healthy(router_url) == {"east/0", "west/0"}, what="both engines again")


@pytest.mark.soak
def test_a_stream_of_a_decode_engine_whose_core_is_frozen_ends_by_an_error(pair: EnginePair, router_url: str) -> None:
    body = {"model": pair.family, "prompt": random_prompt(64, seed=910), "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection(router_url.removeprefix("http://"), timeout=REQUEST_SECONDS)
    connection.request("POST", "/v1/completions", json.dumps(body | {"max_tokens": 4000}))
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    with paused(_core(pair.decode)):
        started = time.monotonic()
        errors = [line for line in response if b'"error"' in line]
        seconds = time.monotonic() - started
    connection.close()
    sys.stdout.write(f"\nthe stream ended after {seconds:.1f} s\n")
    assert json.loads(errors[0].removeprefix(b"data: "))["error"]["code"] == 502
    assert seconds < MAX_STREAM_SECONDS
