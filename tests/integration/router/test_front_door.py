"""Router over real sockets: legs, answers and refusals."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from prfaas import grants
from prfaas.hashing import HashChain, root_hash
from prfaas.router.http import app, limits
from prfaas.scheduler.route import route
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from tests.integration.console.terminal import run_here, run_here_on_terminal
from tests.integration.router.openai_client import assert_serves_an_openai_client
from tests.support.paced_engine import MODEL
from tests.support.router import (
    LONG,
    SECRET,
    SHORT,
    STREAMED,
    STREAMED_CHAT,
    RunningRouter,
    T,
    counted_requests,
    running_router,
)
from tests.support.secret_files import write_secret
from tests.support.waiting import PATIENCE_SECONDS, until
from tools.free_ports import free_address


@pytest.fixture
async def router() -> AsyncIterator[RunningRouter]:
    async with running_router() as made:
        yield made


async def test_short_prompt_is_sent_unchanged_and_not_tokenised(router: RunningRouter) -> None:
    status, body, headers = await router.post({"prompt": SHORT, "stream": True, "user": "me"})
    assert (status, body) == (200, STREAMED)
    assert (headers["x-prfaas-route"], headers["x-prfaas-reason"]) == ("local", "short")
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert router.west.bodies == [{"model": MODEL, "prompt": SHORT, "stream": True, "user": "me"}]
    assert (router.east.bodies, router.west.num_tokenised) == ([], 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("as_token_ids", [True, False])
async def test_long_prompt_goes_to_both_engines_under_one_grant(
    router: RunningRouter, stream: bool, as_token_ids: bool
) -> None:
    tokens = list(LONG.encode())
    prompt = tokens if as_token_ids else LONG
    status, body, headers = await router.post(
        {"prompt": prompt, "stream": stream, "stop": "x"}, **{"x-request-id": "r1"}
    )
    assert status == 200 and (body == STREAMED or not stream)
    assert (headers["x-prfaas-route"], headers["x-request-id"]) == ("remote", "r1")
    prefill, decode = router.east.bodies[0], router.west.bodies[0]
    assert (prefill["prompt"], decode["prompt"]) == (tokens[:-1], tokens)
    assert (decode["stop"], "stop" in prefill, "stream" in prefill) == ("x", False, False)
    assert router.east.request_ids == router.west.request_ids == ["r1"]
    assert router.west.num_tokenised == (0 if as_token_ids else 1)
    texts = {prefill["kv_transfer_params"]["prfaas_grant"], decode["kv_transfer_params"]["prfaas_grant"]}
    assert len(texts) == 1
    grant = grants.verify(grants.from_text(texts.pop()), grants.derive_key(SECRET, "grant"), kind="transfer", now=0.0)
    assert (grant.source, grant.destination, grant.num_tokens) == ("agent-east-0", "agent-west-0", T)
    assert grant.prompt_hash == HashChain(root_hash(MODEL), tokens[:-1]).at(T)
    assert headers["x-prfaas-transfer"] == grant.transfer_id.hex()


async def test_decode_engine_renders_a_long_chat_itself(router: RunningRouter) -> None:
    messages = [{"role": "user", "content": LONG}]
    status, body, headers = await router.post({"messages": messages, "stream": True}, path="/v1/chat/completions")
    assert (status, body) == (200, STREAMED_CHAT) and headers["x-prfaas-route"] == "remote"
    assert router.west.bodies[0]["messages"] == messages
    assert router.east.bodies[0]["prompt"] == list(json.dumps(messages).encode())[:-1]


async def test_adapter_request_stays_local(router: RunningRouter) -> None:
    _, _, headers = await router.post({"prompt": LONG, "model": "adapter"})
    assert headers["x-prfaas-reason"] == "not_transferable"
    assert router.east.bodies == []


async def test_request_that_the_tokenizer_rejects_is_left_to_the_engine(router: RunningRouter) -> None:
    router.west.status = 400
    status, body, headers = await router.post({"prompt": LONG})
    assert (status, b"planned" in body, headers["x-prfaas-reason"]) == (400, True, "not_transferable")


async def test_engine_with_an_invalid_list_of_models_is_down(router: RunningRouter) -> None:
    router.west.healthy = False
    await router.until_health(west_0=False)
    odd: list[Any] = [{"data": ["m"]}, {"data": []}, [], {"data": {"id": "m"}}]
    for models in odd:
        router.west.models, router.west.healthy, before = models, True, router.west.num_probes
        await until(lambda before=before: router.west.num_probes >= before + 2)  # type: ignore[misc]
        assert (await router.health())["west_0"] is False
    router.west.models = None
    await router.until_health(west_0=True)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_bad_request_is_refused_with_its_field(router: RunningRouter, path: str) -> None:
    body = {"prompt": SHORT, "input": SHORT, "kv_transfer_params": {"do_remote_prefill": True}}
    status, text, _ = await router.post(body, path=path)
    assert status == 400 and "kv_transfer_params" in json.loads(text)["error"]["message"]
    assert router.west.bodies == []


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
async def test_body_above_the_limit_is_refused(path: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (app, limits):
        monkeypatch.setattr(module, "MAX_BODY_BYTES", 4096)
    async with running_router() as router:
        status, text, _ = await router.post({field: "z" * 5000}, path=path)
        assert status == 413 and "exceeds 4096 bytes" in json.loads(text)["error"]["message"]
        assert router.west.bodies == []


async def test_other_paths_are_forwarded(router: RunningRouter) -> None:
    status, _, _ = await router.post({"input": "x"}, path="/v1/embeddings?k=v")
    assert (status, router.west.bodies) == (200, [{"model": MODEL, "input": "x"}])
    status, models = await router.get("/v1/models")
    assert (status, models["data"][0]["id"]) == (200, MODEL)
    async with router.session.get(f"{router.url}/v1/unheard-of") as response:
        assert response.status == 404


async def test_forwarded_request_has_an_id_a_log_line_and_a_count(
    router: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    def count(status: int) -> float:
        return counted_requests(status, "forwarded", "refused" if status >= 400 else "completed")

    before = {status: count(status) for status in (200, 403, 404)}
    with caplog.at_level(logging.INFO, logger="prfaas.router"):
        _, _, headers = await router.post({"input": "x"}, path="/v1/embeddings", **{"x-request-id": "r1"})
        assert (headers["x-request-id"], router.west.request_ids) == ("r1", ["r1"])
        for path, status in (("/v1/unheard-of", 404), ("/v1/load_lora_adapter", 403)):
            async with router.session.get(f"{router.url}{path}", headers={"x-request-id": "a b"}) as response:
                assert response.status == status and len(response.headers["x-request-id"]) == 32
        await until(lambda: {status: count(status) - before[status] for status in before} == dict.fromkeys(before, 1.0))
    lines = [record.getMessage() for record in caplog.records if "request.complete" in record.getMessage()]
    assert len(lines) == 3 and "/v1/unheard-of" in lines[1]


async def test_late_answer_has_its_request_id() -> None:
    async with running_router(request_timeout=0.2) as router:
        router.west.hangs = True
        for path in ("/v1/completions", "/v1/embeddings"):
            status, _, headers = await router.post({"prompt": SHORT}, path=path, **{"x-request-id": "r1"})
            assert (status, headers["x-request-id"]) == (504, "r1")
        await until(lambda: router.west.num_broken_off == 1, what="the end of the decode leg")


async def test_forwarded_request_goes_to_an_engine_that_serves_its_model() -> None:
    async with running_router(num_wests=2) as router:
        router.wests[1].models, router.wests[1].healthy = {"data": [{"id": "other"}]}, False
        await router.until_health(west_1=False)
        router.wests[1].healthy = True
        await router.until_health(west_1=True)
        for model in (MODEL, "other", "unheard-of", "other", MODEL):
            status, _, _ = await router.post({"model": model, "query": "x"}, path="/v1/rerank")
            assert status == 200
        assert [body["model"] for body in router.wests[1].bodies] == ["other", "other"]


async def test_decision_is_explained_and_can_be_replayed(router: RunningRouter) -> None:
    await router.post({"prompt": LONG}, **{"x-request-id": "r2"})
    _, record = await router.get("/debug/decision/r2")
    assert (record["route"], record["num_prompt_tokens"], record["decided_by"]) == ("remote", T + 1, "router")
    assert "exceed the threshold" in record["explanation"]
    again = route(msgspec.convert(record["snapshot"], Snapshot), msgspec.convert(record["facts"], RequestFacts))
    assert (again.route, again.reason, again.decode) == (record["route"], record["reason"], record["decode"])
    assert (await router.get("/debug/decision/none"))[0] == 404
    async with router.session.get(f"{router.url}/metrics") as response:
        assert b'prfaas_router_decisions_total{reason="long",route="remote"}' in await response.read()


async def test_turns_of_a_session_go_to_one_node() -> None:
    async with running_router(num_wests=3) as router:
        for session in "abcabcabc":
            await router.post({"prompt": SHORT + session}, **{"x-session-id": session})
        for engine in router.wests:
            assert len(engine.bodies) % 3 == 0


async def test_unchanged_openai_client_is_served_on_every_route(router: RunningRouter) -> None:
    await assert_serves_an_openai_client(router.url)


async def test_only_clients_with_a_key_are_served_and_engines_get_their_own_key(tmp_path: Path) -> None:
    write_secret(tmp_path / "clients", "# ours\nsecret-one\n\nsecret-two\n")
    write_secret(tmp_path / "engine", "engine-key\n")
    async with running_router(api_keys_file=tmp_path / "clients", engine_api_key_file=tmp_path / "engine") as router:
        for path in ("/v1/completions", "/v1/embeddings"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret-one"}):
                status, body, _ = await router.post({"prompt": LONG, "input": "x"}, path=path, **headers)
                assert (status, b"authentication_error" in body) == (401, True)
        assert router.west.bodies == []
        for key in ("secret-one", "secret-two"):
            assert (await router.post({"prompt": LONG}, Authorization=f"Bearer {key}"))[0] == 200
        assert router.east.authorizations == router.west.authorizations == {"Bearer engine-key"}


async def test_tokens_are_counted_for_the_client_that_was_answered(tmp_path: Path) -> None:
    write_secret(tmp_path / "clients", "key-a acme\n")
    async with running_router(api_keys_file=tmp_path / "clients") as router:
        before, key = _tokens_of("acme"), {"Authorization": "Bearer key-a"}
        router.west.status = 500
        assert (await router.post({"prompt": SHORT}, **key))[0] == 500
        router.west.status = 200
        assert (await router.post({"prompt": SHORT}, **key))[0] == 200
        # A prompt and an answer of three tokens each, as the engine's usage says.
        await until(lambda: _tokens_of("acme") - before == 6)


def _tokens_of(client: str) -> float:
    return REGISTRY.get_sample_value("prfaas_router_client_tokens_total", {"client": client}) or 0.0


async def test_client_key_cannot_change_the_deployment(tmp_path: Path) -> None:
    write_secret(tmp_path / "clients", "key-a acme\n")
    async with running_router(api_keys_file=tmp_path / "clients") as router:
        for path in ("/drain", "/undrain", "/pool", "/role", "/plan", "/debug/decision/x"):
            assert (await router.post({"prompt": SHORT}, path=path, Authorization="Bearer key-a"))[0] in (404, 405)


@pytest.mark.parametrize("path", ["/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/..%2fsleep"])
async def test_client_path_cannot_reach_other_pages(router: RunningRouter, path: str) -> None:
    """Sent as it stands: clients' libraries would resolve it first."""
    host, port = router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 403 ") and b"permission_error" in answer


async def test_pages_of_the_router_are_for_operators_if_clients_need_keys(tmp_path: Path) -> None:
    write_secret(tmp_path / "clients", "key-a acme\n")
    client = {"Authorization": "Bearer key-a"}
    async with running_router(api_keys_file=tmp_path / "clients") as router:
        assert (await router.post({"prompt": SHORT}, **client, **{"x-request-id": "r1"}))[0] == 200
        before = _page_refusals()
        for path in ("/metrics", "/debug/decision/r1"):
            assert [await router.status(path, headers) for headers in ({}, client, router.operator)] == [401, 401, 200]
        assert _page_refusals() == before + 4
        async with router.session.get(f"{router.url}/health") as response:
            assert await response.json() == {"status": "ok"}
        assert (await router.post({"prompt": SHORT}, **router.operator))[0] == 401


async def test_unknown_client_leaves_no_record_and_takes_no_place(tmp_path: Path) -> None:
    write_secret(tmp_path / "clients", "key-a acme\n")
    async with running_router(api_keys_file=tmp_path / "clients") as router:
        client = {"Authorization": "Bearer key-a", "x-request-id": "r1"}
        assert (await router.post({"prompt": SHORT}, **client))[0] == 200
        for request_id in ("r1", "r2"):
            assert (await router.post({"prompt": SHORT}, **{"x-request-id": request_id}))[0] == 401
        status, record = await router.get("/debug/decision/r1")
        assert (status, record["route"]) == (200, "local")
        assert (await router.get("/debug/decision/r2"))[0] == 404


async def test_request_ids_of_different_clients_do_not_collide(tmp_path: Path) -> None:
    write_secret(tmp_path / "clients", "key-a acme\nkey-b beta\n")
    async with running_router(api_keys_file=tmp_path / "clients") as router:

        async def ask(key: str, prompt: str) -> None:
            headers = {"Authorization": f"Bearer {key}", "x-request-id": "r1"}
            assert (await router.post({"prompt": prompt}, **headers))[0] == 200

        await ask("key-a", LONG)
        await ask("key-b", SHORT)
        _, first = await router.get("/debug/decision/r1")
        assert (first["client"], first["route"]) == ("beta", "local"), "the newest"
        assert [(record["client"], record["route"]) for record in first["others"]] == [("acme", "remote")]
        await ask("key-a", SHORT)
        _, first = await router.get("/debug/decision/r1")
        assert (first["client"], first["route"]) == ("acme", "local"), "his own later one takes its place"
        assert [record["client"] for record in first["others"]] == ["beta"]
        flags = [f"--routers={router.url}", f"--router-key-file={tmp_path / 'operators'}", "--timeout=60"]
        ran = await asyncio.to_thread(run_here_on_terminal, "explain", "r1", *flags)
        assert ran.status == 0 and "acme" in ran.output and "beta" in ran.output, ran.output


async def test_explain_lists_the_records_of_every_router_newest_first() -> None:
    async with running_router() as first_door, running_router() as second_door:
        for router, prompt in ((first_door, LONG), (second_door, SHORT)):
            assert (await router.post({"prompt": prompt}, **{"x-request-id": "r1"}))[0] == 200
        silent = f"http://{free_address()}"
        flags = [f"--routers={silent},{first_door.url},{second_door.url}", "--timeout=60"]
        ran = await asyncio.to_thread(run_here, "explain", "r1", *flags)
        (older,) = ran.document["others"]
        assert [(page["page"], page["route"]) for page in (ran.document, older)] == [
            (f"{second_door.url}/debug/decision/r1", "local"),
            (f"{first_door.url}/debug/decision/r1", "remote"),
        ]
        assert [silent in page for page in ran.document["unanswered"]] == [True]
        seen = await asyncio.to_thread(run_here_on_terminal, "explain", "r1", *flags)
        assert seen.status == 0 and "Not answered" in seen.output and first_door.url in seen.output
        assert set(older["phases"]) == {"decide", "leg", "handover"} and older["threshold_tokens"] > 0
        assert "Time to first token" in seen.output and "Cost of each route" in seen.output


def _page_refusals() -> float:
    pages = ({"page": "metrics"}, {"page": "decision"})
    return sum(REGISTRY.get_sample_value("prfaas_router_page_refusals_total", page) or 0.0 for page in pages)


async def test_requests_above_the_limit_are_told_to_retry() -> None:
    async with running_router(max_requests=1) as router:
        router.west.hangs = True
        first = asyncio.create_task(router.post({"prompt": SHORT}))
        await until(lambda: router.west.bodies)
        for path in ("/v1/completions", "/v1/embeddings"):
            status, body, headers = await router.post({"prompt": SHORT}, path=path)
            assert (status, headers["Retry-After"]) == (429, "1") and b"rate_limit_error" in body
        first.cancel()
        await until(lambda: router.west.num_broken_off == 1)
        router.west.hangs = False
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await router.post({"prompt": SHORT}))[0] != 200:  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.01)


async def test_policy_pd_within_one_cluster_prefills_on_a_pd_p_instance() -> None:
    async with running_router(one_cluster=True, local_policy="pd") as router:
        for prompt in (SHORT, LONG):
            _, _, headers = await router.post({"prompt": prompt})
            assert (headers["x-prfaas-route"], headers["x-prfaas-reason"]) == ("remote", "pd")
        assert [len(engine.bodies) for engine in (router.east, router.west)] == [2, 2]
