"""Prefill within a PD cluster under the manager's policies."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import ConfigError
from prfaas.manager.daemon import Manager
from tests.integration.router.managed import Managed, make_managed
from tests.support.deployment import SECRET, Deployment
from tests.support.waiting import PATIENCE_SECONDS, until
from tests.unit.scheduler.endpoint_picker.conformance import DATA

TURN_ONE = list(range(1, 161))
TURN_TWO = [*TURN_ONE, *range(201, 241)]


@contextlib.asynccontextmanager
async def _pair(directory: Path, *, num_wests: int = 1, **manager_settings: Any) -> AsyncIterator[Managed]:
    """Start a PD-P instance, `router.east`, and PD-D instances of the same cluster."""
    making = make_managed(directory, num_wests=num_wests, one_cluster=True, manager_settings=manager_settings)
    async with making as managed:
        await managed.router.until_health(east_0=True, **{f"west-{n}_0": True for n in range(num_wests)})
        yield managed


async def _asked(pair: Managed, prompt: list[int], **headers: str) -> tuple[str, str]:
    """Return the route and the reason of one request."""
    record = await pair.router.decided(prompt, **headers)
    return record["route"], record["reason"]


def _table(directory: Path, *, local_gain: float) -> Path:
    """Return the decode node's own prefill takes TTFT down by so much, and leaves TPOT as it is."""
    entries = [
        {
            "context_class": context,
            "workload_type": workload,
            "qps": 1.0,
            "pd_ttft_ms": 100.0,
            "ppd_ttft_ms": 100.0 * (1 - local_gain),
            "pd_tpot_ms": 10.0,
            "ppd_tpot_ms": 10.0,
        }
        for context in ("small", "large")
        for workload in ("tiny", "small_bal", "mid_bal", "mid_paste")
    ]
    written = directory / "table.json"
    written.write_text(json.dumps({"weights": {"w_ttft": 1.0, "w_tpot": 1.0}, "entries": entries}))
    return written


@pytest.mark.parametrize(
    ("local_gain", "expected"), [(0.5, ("local", "ppd_table_local")), (-0.5, ("remote", "ppd_table_pd"))]
)
async def test_ppd_prefills_first_turns_on_pd_p_and_later_turns_by_its_table(
    tmp_path: Path, local_gain: float, expected: tuple[str, str]
) -> None:
    async with _pair(tmp_path, local_policy="ppd", ppd_table=_table(tmp_path, local_gain=local_gain)) as pair:
        assert await _asked(pair, TURN_ONE) == ("remote", "ppd_first_turn")
        await pair.hold(TURN_ONE)
        assert await _asked(pair, TURN_TWO) == expected


async def test_ppd_treats_the_first_completion_of_a_session_as_its_first_turn(tmp_path: Path) -> None:
    async with _pair(tmp_path, local_policy="ppd", ppd_table=_table(tmp_path, local_gain=0.5)) as pair:
        await _asked(pair, TURN_ONE, **{"x-session-id": "one"})
        await pair.hold(TURN_ONE)
        assert await _asked(pair, TURN_TWO, **{"x-session-id": "two"}) == ("remote", "ppd_first_turn")
        assert await _asked(pair, TURN_TWO, **{"x-session-id": "two"}) == ("local", "ppd_table_local")
        assert await _asked(pair, TURN_TWO) == ("local", "ppd_table_local"), "without a session the KV says it"


def _picker(directory: Path, limit: int) -> Path:
    """llm-d's own minimal configuration, with another limit."""
    written = directory / "picker.yaml"
    minimal = (DATA / "llmd-minimal.yaml").read_text()
    written.write_text(minimal.replace("nonCachedTokens: 8", f"nonCachedTokens: {limit}"))
    return written


@pytest.mark.parametrize(("limit", "expected"), [(41, ("local", "suffix_cached")), (40, ("remote", "suffix_uncached"))])
async def test_configuration_of_llm_d_decides(tmp_path: Path, limit: int, expected: tuple[str, str]) -> None:
    settings: dict[str, Any] = {"local_policy": "endpoint_picker", "endpoint_picker": _picker(tmp_path, limit)}
    async with _pair(tmp_path, **settings) as pair:
        assert await _asked(pair, TURN_ONE) == ("remote", "suffix_uncached")
        await pair.hold(TURN_ONE)
        assert await _asked(pair, TURN_TWO) == expected


async def test_endpoint_picker_knows_the_tokens_in_flight(tmp_path: Path) -> None:
    plugins = "".join(f"- type: {kind}\n" for kind in ("decode-filter", "token-load-scorer", "max-score-picker"))
    written = tmp_path / "picker.yaml"
    written.write_text(f"apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n{plugins}")
    settings: dict[str, Any] = {"local_policy": "endpoint_picker", "endpoint_picker": written}
    async with _pair(tmp_path, num_wests=2, **settings) as pair, asyncio.TaskGroup() as tasks:
        for engine in pair.router.wests:
            engine.hangs = True
        asking = [tasks.create_task(_asked(pair, TURN_ONE))]
        await until(lambda: any(engine.bodies for engine in pair.router.wests))
        busy, free = sorted(pair.router.wests, key=lambda engine: -len(engine.bodies))
        for prompt, count in (([1, 2, 3], 1), ([4, 5, 6], 2)):
            asking.append(tasks.create_task(_asked(pair, prompt)))
            await until(lambda count=count: len(free.bodies) == count)  # type: ignore[misc]
        assert len(busy.bodies) == 1
        for task in asking:
            task.cancel()


async def test_first_turn_stays_a_first_turn_when_it_is_retried(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"local_policy": "ppd", "ppd_table": _table(tmp_path, local_gain=0.5)}
    async with _pair(tmp_path, num_wests=2, **settings) as pair:
        pair.router.wests[0].break_after_tokens = 0  # The engine closes the connection before a first token.
        record: dict[str, Any] = {"failures": []}
        async with asyncio.timeout(PATIENCE_SECONDS):
            for number in itertools.count():  # A seed leads to the broken node at some point.
                body = {"prompt": [number, *TURN_ONE], "stream": True}
                _, _, headers = await pair.router.post(body, **{"x-session-id": str(number)})
                _, record = await pair.router.get(f"/debug/decision/{headers['x-request-id']}")
                if record["failures"]:
                    break
        assert (record["decided_by"], record["reason"]) == ("manager", "ppd_first_turn")


async def test_router_without_an_answer_keeps_the_managers_policy_and_reports_it(tmp_path: Path) -> None:
    async with _pair(tmp_path, local_policy="pd") as pair:
        assert await _asked(pair, TURN_ONE) == ("remote", "pd")
        await pair.deployment.stop_manager(pair.manager)
        _, _, headers = await pair.router.post({"prompt": TURN_ONE})
        _, record = await pair.router.get(f"/debug/decision/{headers['x-request-id']}")
        assert (record["route"], record["reason"], record["decided_by"]) == ("remote", "pd", "router")
        assert "no manager answered in time" in record["explanation"]
        pair.router.east.healthy = False
        await pair.router.until_health(east_0=False)
        assert await _asked(pair, TURN_ONE) == ("local", "no_pd_prefill_instance")


def test_policy_ppd_needs_its_table(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    with pytest.raises(ValueError, match="ppd_table: missing"):
        deployment.config(local_policy="ppd")
    with pytest.raises(ValueError, match="endpoint_picker: missing"):
        deployment.config(local_policy="endpoint_picker")
    (tmp_path / "broken.yaml").write_text("kind: EndpointPickerConfig\nfeatureGates: [nonsense]")
    picking = {"local_policy": "endpoint_picker", "endpoint_picker": tmp_path / "broken.yaml"}
    with pytest.raises(ConfigError, match=r"broken\.yaml: .*apiVersion"):
        Manager(deployment.config(**picking, redis_url="redis://127.0.0.1:1"), SECRET)
    (tmp_path / "broken.json").write_text("{}")
    config = deployment.config(local_policy="ppd", ppd_table=tmp_path / "broken.json", redis_url="redis://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        Manager(config, SECRET)
