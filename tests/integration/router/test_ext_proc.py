"""Endpoint picker as gateways speak to it: phases, subsets, refusals and health."""

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY

from prfaas.errors import ConfigError
from prfaas.router.config import ClusterConfig, InstanceConfig
from prfaas.router.engines.fleet import Fleet
from prfaas.router.engines.legs import LegClient
from prfaas.router.ext_proc.endpoint_choice import DESTINATION, SUBSET, EndpointChooser, host_port
from prfaas.router.ext_proc.messages import CHUNK_BYTES
from prfaas.router.ext_proc.server import SERVICE, Exchange, open_picker
from prfaas.router.http.admission import RequestAdmission, Tenants
from prfaas.router.openai.headers import GRANT_HEADER, PREFILL_HEADER
from prfaas.router.openai.tokenizer import Tokenizer
from prfaas.router.routing.decide import DecisionMaker
from prfaas.router.routing.record import RequestRecords
from prfaas.router.routing.serve import RequestHandler
from prfaas.router.server import open_router
from prfaas.transport.net.tls import TlsConfig
from prfaas.types import ClusterKind, InstanceRole
from tests.support.router import LONG, SECRET, SHORT, RunningRouter, T, counted_requests, router_config, running_router
from tests.support.secret_files import write_secret
from tests.support.waiting import PATIENCE_SECONDS, until
from tests.unit.scheduler.endpoint_picker.conformance import Case, cases, check
from tools.free_ports import free_address

DUPLEX = pb.ProtocolConfiguration(request_body_mode=4, response_body_mode=4)
BUFFERED = pb.ProtocolConfiguration(request_body_mode=2, response_body_mode=0)


class Gateway:
    """Our picker, asked as Envoy asks."""

    def __init__(self, router: RunningRouter, channel: Any) -> None:
        self.router = router
        self.channel = channel
        self._stub = external_processor_pb2_grpc.ExternalProcessorStub(channel)

    async def exchange(self, messages: Sequence[Any]) -> list[Any]:
        return [answer async for answer in self._stub.Process(iter(messages))]


@contextlib.asynccontextmanager
async def _gateway(**settings: Any) -> AsyncIterator[Gateway]:
    picker = free_address()
    making = running_router(ext_proc_listen=picker, picker=open_picker, **settings)
    async with making as router, grpc.aio.insecure_channel(picker) as channel:
        yield Gateway(router, channel)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with _gateway(num_wests=2) as made:
        yield made


def _headers(
    *, path: str = "/v1/completions", modes: Any = DUPLEX, ends: bool = False, subset: str | None = None, **more: str
) -> Any:
    message = pb.ProcessingRequest(protocol_config=modes)
    for name, value in ({":path": path} | more).items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.request_headers.end_of_stream = ends
    if subset is not None:
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({SUBSET: subset})
    return message


def _body(text: str, *, pieces: int = 1) -> Iterator[Any]:
    raw = f'{{"model": "m", "prompt": "{text}"}}'.encode()
    size = -(-len(raw) // pieces)
    for start in range(0, len(raw), size):
        piece = pb.HttpBody(body=raw[start : start + size], end_of_stream=start + size >= len(raw))
        yield pb.ProcessingRequest(request_body=piece)


def _set(answer: Any) -> dict[str, str]:
    mutation = answer.request_headers.response.header_mutation
    return {header.header.key: header.header.raw_value.decode() for header in mutation.set_headers}


async def test_streamed_body_is_returned_after_the_destination(gateway: Gateway) -> None:
    first, *rest = await gateway.exchange([_headers(), *_body(LONG, pieces=3)])
    headers = _set(first)
    assert headers[DESTINATION] in {host_port(engine.url) for engine in gateway.router.wests}
    assert headers[PREFILL_HEADER] == host_port(gateway.router.east.url)
    assert headers[GRANT_HEADER]
    assert first.dynamic_metadata["envoy.lb"][DESTINATION] == headers[DESTINATION]
    streamed = [answer.request_body.response.body_mutation.streamed_response for answer in rest]
    assert b"".join(chunk.body for chunk in streamed) == b"".join(chunk.request_body.body for chunk in _body(LONG))
    assert [chunk.end_of_stream for chunk in streamed] == [False] * (len(streamed) - 1) + [True]


async def test_long_body_is_returned_in_chunks_that_envoy_accepts(gateway: Gateway) -> None:
    _, *rest = await gateway.exchange([_headers(), *_body("z" * (3 * CHUNK_BYTES), pieces=2)])
    sizes = [len(answer.request_body.response.body_mutation.streamed_response.body) for answer in rest]
    assert len(sizes) == 4 and max(sizes) <= CHUNK_BYTES


async def test_trailers_end_an_open_body(gateway: Gateway) -> None:
    (body,) = _body(SHORT)
    body.request_body.end_of_stream = False
    trailers = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())
    first, piece, last = await gateway.exchange([_headers(), body, trailers])
    assert DESTINATION in _set(first)
    assert not piece.request_body.response.body_mutation.streamed_response.end_of_stream
    assert last.HasField("request_trailers")


async def test_gateway_that_does_not_stream_bodies_is_refused(gateway: Gateway) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="request_body_mode"):
        await gateway.exchange([_headers(modes=BUFFERED), *_body(SHORT)])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_returned_body_has_the_clients_salt(tmp_path: Path, path: str) -> None:
    write_secret(tmp_path / "clients", "key-a acme\n")
    async with _gateway(api_keys_file=tmp_path / "clients") as gateway:
        asked = [_headers(path=path, authorization="Bearer key-a"), *_body(SHORT)]
        first, *rest = await gateway.exchange(asked)
    body = b"".join(response.request_body.response.body_mutation.streamed_response.body for response in rest)
    assert json.loads(body) == {"model": "m", "prompt": SHORT, "cache_salt": "acme"}
    assert _set(first)["content-length"] == str(len(body)), "Envoy refuses a body of another length"


@pytest.mark.parametrize("path", ["/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/load_lora_adapter"])
async def test_forbidden_path_is_answered_by_the_picker(gateway: Gateway, path: str) -> None:
    (answer,) = await gateway.exchange([_headers(path=path, ends=True)])
    assert answer.immediate_response.status.code == 403


@pytest.mark.parametrize("field", ["cache_salt", "kv_transfer_params"])
async def test_reserved_fields_are_refused_on_every_path(gateway: Gateway, field: str) -> None:
    body = pb.ProcessingRequest(request_body=pb.HttpBody(body=f'{{"{field}": "x"}}'.encode(), end_of_stream=True))
    (answer,) = await gateway.exchange([_headers(path="/v1/responses"), body])
    assert answer.immediate_response.status.code == 400


def _answered(answer: Any) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer in an engine's place."""
    refusal = answer.immediate_response
    return refusal.status.code, {
        header.header.key: header.header.raw_value.decode() for header in refusal.headers.set_headers
    }


def _counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def _lines(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """Return the lines that tell of a request."""
    told = (record.getMessage() for record in caplog.records)
    return [line for line in told if "request.complete" in line and name in line]


async def _until_told(caplog: pytest.LogCaptureFixture, name: str) -> None:
    await until(lambda: _lines(caplog, name))
    assert len(_lines(caplog, name)) == 1


async def test_refused_request_has_an_id_a_log_line_and_a_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_secret(tmp_path / "clients", "key-a acme\n")
    nobody = {"route": "refused", "reason": "no_decode_instance"}
    before = _counted("prfaas_router_decisions_total", **nobody), counted_requests(503, "forwarded", "failed")
    caplog.set_level(logging.INFO, logger="prfaas.router")
    async with _gateway(api_keys_file=tmp_path / "clients") as gateway:
        router = gateway.router
        router.west.healthy = False
        await router.until_health(west_0=False)
        cases: tuple[tuple[str, int, str, str], ...] = (
            ("r503", 503, "key-a", "/v1/completions"),
            ("r503-on", 503, "key-a", "/v1/embeddings"),
            ("r400", 400, "key-a", "/v1/completions"),
            ("r403", 403, "key-a", "/v1/load_lora_adapter"),
            ("r401", 401, "none", "/v1/completions"),
            ("r503-last", 503, "key-a", "/v1/completions"),
        )
        for name, status, key, path in cases:
            more: dict[str, Any] = {"x-request-id": name, "authorization": f"Bearer {key}"}
            body = pb.HttpBody(
                body=b"[" if status == 400 else json.dumps({"prompt": SHORT}).encode(), end_of_stream=True
            )
            asked = [_headers(path=path, **more), pb.ProcessingRequest(request_body=body)]
            (answer,) = await gateway.exchange(asked)
            told, headers = _answered(answer)
            assert (told, headers["x-request-id"]) == (status, name)
            decided = path == "/v1/completions" and status == 503
            assert headers.get("x-prfaas-reason") == ("no_decode_instance" if decided else None), name
            await _until_told(caplog, name)
            if status in (400, 503):
                _, record = await router.get(f"/debug/decision/{name}")
                assert record["status"] == status
        assert (_counted("prfaas_router_decisions_total", **nobody) - before[0]) == 2
        assert (counted_requests(503, "forwarded", "failed") - before[1]) == 1


async def test_chosen_request_has_a_log_line_with_the_engines_status(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="prfaas.router")
    answered = pb.ProcessingRequest()
    answered.response_headers.headers.headers.add(key=":status", raw_value=b"418")
    for path, field in (("/v1/completions", "route"), ("/v1/embeddings", "path")):
        name = f"chosen-{field}"
        own: dict[str, Any] = {"x-request-id": name}
        await gateway.exchange([_headers(path=path, **own), *_body(SHORT), answered])
        await _until_told(caplog, name)
        (line,) = _lines(caplog, name)
        assert "status=418" in line and f" {field}=" in line, line
        assert (" path=" in line) == (field == "path"), line


async def test_answers_pass_unchanged(gateway: Gateway) -> None:
    headers = pb.ProcessingRequest(response_headers=pb.HttpHeaders(end_of_stream=False))
    body = pb.ProcessingRequest(response_body=pb.HttpBody(body=b"abc", end_of_stream=True))
    *_, of_headers, of_body = await gateway.exchange([_headers(), *_body(SHORT), headers, body])
    assert of_headers.HasField("response_headers")
    streamed = of_body.response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"abc", True)


async def test_only_endpoints_of_the_gateways_subset_are_chosen(gateway: Gateway) -> None:
    address = host_port(gateway.router.wests[1].url)
    for path in ("/v1/completions", "/v1/embeddings"):
        first, *_ = await gateway.exchange([_headers(path=path, subset=f"{address},10.9.9.9:1"), *_body(SHORT)])
        assert _set(first)[DESTINATION] == address
        (refused,) = await gateway.exchange([_headers(path=path, subset="10.9.9.9:1"), *_body(SHORT)])
        assert refused.immediate_response.status.code == 503


async def test_engine_outside_the_subset_is_not_chosen_even_if_all_breakers_are_open(open_at_once: None) -> None:
    async with _gateway() as gateway:
        west = gateway.router.west
        west.status = 500
        assert (await gateway.router.post({"prompt": SHORT}))[0] == 500
        (refused,) = await gateway.exchange([_headers(subset="10.9.9.9:1"), *_body(SHORT)])
        assert refused.immediate_response.status.code == 503
        first, *_ = await gateway.exchange([_headers(subset=host_port(west.url)), *_body(SHORT)])
        assert DESTINATION in _set(first)


@cases("routing-headers")
async def test_prefill_engine_is_named_as_in_llm_d(case: Case) -> None:
    target = case["given"].get("prefill")
    address = f"[{target[0]}]:{target[1]}" if isinstance(target, list) and target else target
    async with _choosing_from(address) as choosing:
        answer = await _placed(choosing, _headers(**case["given"].get("incoming", {})))
    assert DESTINATION in _set(answer)
    check(case, {"headers": {PREFILL_HEADER: _set(answer).get(PREFILL_HEADER, "")}})
    # Without a target the header goes away in every case, so that a client's own never passes.
    assert (PREFILL_HEADER in answer.request_headers.response.header_mutation.remove_headers) == (not address)


@contextlib.asynccontextmanager
async def _choosing_from(prefill: str | None) -> AsyncIterator[EndpointChooser]:
    """One engine that decodes and, where `prefill` is the host:port of one, another that prefills for it."""
    roles: tuple[tuple[str, ClusterKind, InstanceRole], ...] = (("10.0.0.9:8000", "pd", "decode"),)
    if prefill:
        roles += ((prefill, "prfaas", "prefill"),)
    config = router_config(clusters=tuple(_cluster(address, kind, role) for address, kind, role in roles))
    async with aiohttp.ClientSession() as session:
        fleet = Fleet(config, session)
        for instance in fleet:
            instance.healthy = True
        deciding, legs = (
            DecisionMaker(config, SECRET, fleet, None),
            LegClient(session, prefill_seconds=PATIENCE_SECONDS),
        )
        admission = RequestAdmission({}, max_requests=1, tenants=Tenants({}))
        yield EndpointChooser(
            fleet, RequestHandler(fleet, deciding, legs, Tokenizer(session)), admission, RequestRecords()
        )


def _cluster(address: str, kind: ClusterKind, role: InstanceRole) -> ClusterConfig:
    engine = InstanceConfig(name=role, url=f"http://{address}", role=role, agent=role, wire="127.0.0.1:7400")
    return ClusterConfig(name=kind, kind=kind, instances=(engine,))


async def _placed(choosing: EndpointChooser, headers: Any) -> Any:
    """Return the first answer to a prompt of token ids that is to be prefilled elsewhere where that can be."""

    async def asked() -> AsyncIterator[Any]:
        yield headers
        body = json.dumps({"prompt": list(range(T + 1))}).encode()
        yield pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True))

    exchange = Exchange(choosing)
    first, *_ = [answer async for answer in exchange.run(asked())]
    return first


async def test_health_service_reports_serving(gateway: Gateway) -> None:
    stub = health_pb2_grpc.HealthStub(gateway.channel)
    for name in ("", SERVICE):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_listening_beyond_loopback_needs_certificates_or_consent() -> None:
    with pytest.raises(ValueError, match="ext_proc_listen"):
        router_config(ext_proc_listen="0.0.0.0:0")


async def test_missing_certificate_file_stops_the_start(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("authority", "certificate", "key")}
    config = router_config(ext_proc_listen="127.0.0.1:0", tls=TlsConfig(**files))
    with pytest.raises(ConfigError, match=str(tmp_path / "certificate")):
        async with open_router(config, SECRET, picker=open_picker):
            raise AssertionError("it listens")
