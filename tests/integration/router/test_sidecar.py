"""Sidecar beside a decode engine: llm-d's own cases, allowed hosts, and failed prefills."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from prfaas.errors import ConfigError
from prfaas.router.openai.headers import PREFILL_HEADER
from prfaas.router.sidecar import server
from prfaas.router.sidecar.config import SidecarConfig
from prfaas.router.sidecar.prefill_host import AllowList, PrefillHostRefused, named_host
from prfaas.router.sidecar.server import open_sidecar
from tests.support.paced_engine import MODEL, PacedEngine, running
from tests.support.router import STREAMED
from tests.support.waiting import until
from tests.unit.scheduler.endpoint_picker.conformance import Case, cases, check
from tools.demo.client import is_answering
from tools.free_ports import free_address

KEPT = {"remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_host": "h", "remote_port": 1}


@dataclass
class Pair:
    """A sidecar before `decode`, and an engine that prefills for it."""

    url: str
    prefill: PacedEngine
    decode: PacedEngine
    session: aiohttp.ClientSession

    async def ask(
        self, body: dict[str, Any], *, path: str = "/v1/completions", host: str | None = None, **headers: str
    ) -> tuple[int, bytes]:
        """Status and body; the header names the prefill engine, another `host`, or nobody when that is empty."""
        named = self.prefill.url.removeprefix("http://") if host is None else host
        headers = {PREFILL_HEADER: named} | {name.replace("_", "-"): value for name, value in headers.items()}
        whole = {"model": MODEL, "prompt": "hello", **body}
        async with self.session.post(self.url + path, json=whole, headers=headers) as response:
            return response.status, await response.read()


@contextlib.asynccontextmanager
async def _pair(**settings: Any) -> AsyncIterator[Pair]:
    prefill, decode = PacedEngine(keeps=KEPT), PacedEngine()
    async with running(prefill, decode):
        config = SidecarConfig(listen="127.0.0.1:0", engine_url=decode.url, **settings)
        async with open_sidecar(config) as address, aiohttp.ClientSession() as session:
            yield Pair(f"http://{address}", prefill, decode, session)


@cases("sidecar.prefill-header")
def test_prefill_host_comes_from_the_header(case: Case) -> None:
    host = named_host(case["given"]["x_prefiller_host_port"])
    check(case, {"prefill": None if host is None else [host]})


@cases("sidecar.nixlv2")
async def test_nixl_hand_over(case: Case) -> None:
    given, expected = case["given"], case["expect"]
    async with _pair() as pair:
        limit = {"max_output_tokens": given["max_output_tokens"]} if "max_output_tokens" in given else {}
        path = given.get("path", "/v1/completions")
        status, _ = await pair.ask(given.get("client", {}) | limit, path=path)
        assert (status, len(pair.prefill.bodies), len(pair.decode.bodies)) == (200, 1, 1)
        assert len(set(pair.prefill.request_ids + pair.decode.request_ids)) == 1
        sent, taken = pair.prefill.bodies[0], pair.decode.bodies[0]
    # The cases call the prefill engine's parameters P.
    taken["kv_transfer_params"] = "P" if taken["kv_transfer_params"] == KEPT else None
    found = {"prefill_body": sent, "decode_body": taken}
    check(case, {name: {key: found[name].get(key, "absent") for key in fields} for name, fields in expected.items()})


@cases("sidecar.cached-tokens")
async def test_client_sees_the_cached_tokens_of_the_prefill_engine(case: Case) -> None:
    given = case["given"]
    async with _pair() as pair:
        pair.prefill.usage, pair.decode.usage = given["prefill_usage"], given["decode_usage"]
        status, body = await pair.ask({"stream": given.get("stream", False)}, path="/v1/chat/completions")
        alone = await pair.ask({"stream": given.get("stream", False)}, path="/v1/chat/completions", host="")
    assert status == 200
    found = [answer["usage"] for answer in _events(body) if answer.get("usage")]
    check(case, {"cached_tokens": found[-1]["prompt_tokens_details"]["cached_tokens"]})
    assert [answer.get("choices") for answer in _events(body)] == [
        answer.get("choices") for answer in _events(alone[1])
    ]


def _events(body: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in body.splitlines()]
    return [json.loads(line) for line in lines if line.startswith(b"{")]


@cases("sidecar.passthrough")
async def test_requests_without_a_prefill_host_go_to_the_decode_engine(case: Case) -> None:
    given = case["given"]
    async with _pair() as pair:
        encoders = {"x_encoder_hosts_ports": given["encoders"]} if "encoders" in given else {}
        status, _ = await pair.ask({}, path=given["path"], host="", **encoders)
        calls = {"prefill_calls": len(pair.prefill.bodies), "decode_calls": len(pair.decode.bodies)}
    check(case, {"status": status, **calls})


@cases("sidecar.encode")
async def test_encoders_change_nothing(case: Case) -> None:
    given = case["given"]
    async with _pair() as pair:
        host = None if "prefill" in given else ""
        assert (await pair.ask({}, host=host, x_encoder_hosts_ports=",".join(given["encoders"])))[0] == 200
        ran = "P/D" if pair.prefill.bodies else "decode"
        assert len(pair.decode.bodies) == 1
    check(case, {"path": ran} | ({"prefill": given["prefill"]} if ran == "P/D" else {}))


@cases("sidecar.ssrf")
async def test_hosts_outside_the_allow_list_are_refused(case: Case) -> None:
    given = case["given"]
    async with _pair(prefill_hosts=tuple(given["allowlist"])) as pair:
        status, _ = await pair.ask({}, host=given["x_prefiller_host_port"])
        check(case, {"status": status})
        assert not pair.decode.bodies


@cases("sidecar.allow-list")
def test_hosts_of_the_allow_list_are_allowed_with_any_port(case: Case) -> None:
    try:
        AllowList(case["given"]["allowlist"]).check(case["given"]["host"])
        allowed = True
    except PrefillHostRefused:
        allowed = False
    check(case, {"allowed": allowed})


@pytest.mark.parametrize(
    ("hosts", "asked", "allowed"),
    [
        ((), "10.1.2.3:8000", True),
        ((), "[fd00::1]:8000", True),
        ((), "8.8.8.8:80", False),
        ((), "169.254.169.254:80", False),
        ((), "[fe80::1]:8000", False),
        ((), "0.0.0.0:8000", False),
        (("169.254.0.0/16",), "169.254.1.2:8000", True),
        (("10.1.0.0/16",), "[::ffff:10.1.2.3]:8000", True),
        ((), "prefill-0:8000", False),
        (("prefill-0",), "prefill-0:8000", True),
        (("prefill-0",), "10.1.2.3:8000", False),
        (("10.1.0.0/16",), "10.2.2.3:8000", False),
        (("10.1.2.3",), "10.1.2.3:8000", True),
        ((), "10.1.2.3", False),
        ((), "http://10.1.2.3:1", False),
    ],
)
def test_allow_list(hosts: tuple[str, ...], asked: str, allowed: bool) -> None:
    listed = AllowList(hosts)
    if allowed:
        listed.check(asked)
        return
    with pytest.raises(PrefillHostRefused, match="x-prefiller-host-port"):
        listed.check(asked)


def test_invalid_network_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"prefill_hosts: 10\.0\.0\.0/99"):
        AllowList(("10.0.0.0/99",))


async def test_without_the_header_all_requests_go_to_the_engine() -> None:
    async with _pair() as pair:
        assert (await pair.ask({"stream": True}, host=""))[1] == STREAMED
        assert not pair.prefill.bodies
        async with (
            pair.session.get(f"{pair.url}/v1/models") as models,
            pair.session.get(f"{pair.url}/health") as health,
        ):
            assert (models.status, health.status) == (200, 200)


@pytest.mark.parametrize("fault", ["error", "gone", "late", "keeps nothing"])
async def test_decode_engine_computes_the_prompt_after_a_failed_prefill(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PREFILL_SECONDS", 0.5 if fault == "late" else 60.0)
    async with _pair() as pair:
        pair.prefill.status = 500 if fault == "error" else 200
        pair.prefill.hangs = fault == "late"
        if fault == "keeps nothing":
            pair.prefill.keeps = None
        if fault == "gone":
            await pair.prefill.stop()
        assert (await pair.ask({}))[0] == 200
        assert ["kv_transfer_params" in asked for asked in pair.decode.bodies] == [False]


async def test_disconnected_client_ends_the_running_leg() -> None:
    async with _pair() as pair:
        pair.prefill.hangs = True
        asking = asyncio.create_task(pair.ask({}))
        await until(lambda: len(pair.prefill.bodies) == 1)
        asking.cancel()
        await until(lambda: pair.prefill.num_broken_off == 1)
        assert not pair.decode.bodies


async def test_a_named_source_of_cached_kv_changes_nothing() -> None:
    async with _pair() as pair:
        for host in ("", None):
            assert (await pair.ask({}, host=host))[0] == 200
            assert (await pair.ask({}, host=host, x_kv_cache_source_host_port="10.0.0.1:8000"))[0] == 200
        local, with_source, handed_over, with_both = pair.decode.bodies
        assert (with_source, with_both) == (local, handed_over) and len(pair.prefill.bodies) == 2


async def test_missing_engine_gives_503_at_once() -> None:
    async with _pair() as pair:
        await pair.decode.stop()
        assert (await pair.ask({}))[0] == 503
        assert (await pair.ask({}, host=""))[0] == 503


async def test_client_cannot_name_foreign_kv() -> None:
    async with _pair() as pair:
        for host in (None, ""):
            status, body = await pair.ask({"kv_transfer_params": {"do_remote_prefill": True}}, host=host)
            assert (status, b"kv_transfer_params" in body) == (400, True)
        assert not pair.prefill.bodies + pair.decode.bodies


async def test_protocol_prfaas_sends_both_legs_at_once_under_the_gateways_grant() -> None:
    async with _pair(protocol="prfaas") as pair:
        assert (await pair.ask({}, x_prfaas_grant="g"))[0] == 200
        sent, taken = pair.prefill.bodies[0], pair.decode.bodies[0]
        assert sent["prompt"] == list(b"hello")[:-1]
        assert sent["kv_transfer_params"] == {"do_remote_decode": True, "prfaas_grant": "g"}
        assert (taken["prompt"], taken["kv_transfer_params"]["prfaas_grant"]) == (list(b"hello"), "g")


@pytest.mark.parametrize("protocol", ["nixl", "prfaas"])
@pytest.mark.parametrize("host", [None, ""], ids=["handed over", "local"])
async def test_salt_from_the_picker_is_in_every_leg(protocol: Any, host: str | None) -> None:
    async with _pair(protocol=protocol) as pair:
        assert (await pair.ask({"cache_salt": "acme"}, host=host, x_prfaas_grant="g"))[0] == 200
        asked = pair.prefill.bodies + pair.decode.bodies
        assert [body["cache_salt"] for body in asked] == ["acme"] * (1 if host == "" else 2)


async def test_protocol_prfaas_without_a_grant_is_a_failed_prefill() -> None:
    async with _pair(protocol="prfaas") as pair:
        assert (await pair.ask({}))[0] == 200
        assert not pair.prefill.bodies


async def test_command_serves_and_has_a_separate_port_for_metrics() -> None:
    async with running(engine := PacedEngine()):
        await _serve_and_ask(engine)


async def _serve_and_ask(engine: PacedEngine) -> None:
    listen, status = free_address(), free_address()
    flags = ("--listen", listen, "--status-listen", status, "--engine-url", engine.url)
    code = "import sys; from prfaas.cli.sidecar import main; sys.exit(main())"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *flags)
    try:
        async with aiohttp.ClientSession() as session:
            await until(lambda: is_answering(f"http://{status}/healthz"), what="a sidecar that serves")
            async with session.post(f"http://{listen}/v1/completions", json={"prompt": "x"}) as response:
                assert json.loads(await response.read())["choices"]
            async with session.get(f"http://{status}/metrics") as response:
                assert 'prfaas_sidecar_requests_total{outcome="local"} 1.0' in await response.text()
    finally:
        process.terminate()
        await process.wait()
    assert process.returncode == 0
