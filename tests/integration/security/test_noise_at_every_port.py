"""Noise at every port, with and without the deployment's secret: it is refused without harm."""

import contextlib
import functools
import random
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2
from google.protobuf.descriptor import MethodDescriptor

from prfaas.agent.engine.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Cancel,
    Hold,
    Lookup,
    Promised,
    Receive,
    Release,
    Send,
    Store,
    encode,
)
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.methods import SERVICE_NAME
from prfaas.rpc.tokens import credentials
from prfaas.transport.protocol.messages import Hello, encode_hello
from prfaas.types import BlockHash, GroupBlocks, TransferId
from tests.integration.security import noise
from tests.integration.security.listening import is_taken, listening_of
from tests.support.agents import layout
from tests.support.waiting import wait_until
from tools.demo.client import is_answering
from tools.free_ports import free_address
from tools.processes import Child, Children
from tools.stack import Stack

NAMES = ("west-0", "router", "operator", "stranger")  # Callers of the manager, each with its token.
FAULTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
PATIENCE_SECONDS = 0.2  # Wait for an answer to an incomplete request.
SECONDS = 0.5  # Wait for any other answer.
SERVICE = pb.DESCRIPTOR.services_by_name["Manager"]
IDS = [TransferId(bytes([number]) * 16) for number in range(3)]
GROUPS = (GroupBlocks(0, 0, (BlockHash(bytes(16)),), BlockHash(bytes(16))),)
ATTACH = encode(Attach(PROTOCOL_VERSION, "w/1", "worker", 0, layout().to_dict()))
HONEST = [ATTACH] + [
    encode(message)
    for key in IDS
    for message in (
        Lookup(key, BlockHash(bytes(16)), bytes(64), 64),
        Send(key, b"", GROUPS),
        Receive(key, b"", BlockHash(bytes(16)), GROUPS),
        Store(key, 32, GROUPS),
        Hold(key, 32, GROUPS),
        Promised(100, 50),
        Release(key),
        Cancel(key),
    )
]


class Target:
    """Everything that listens: a manager, an agent, an engine, a router with a gateway's port, a sidecar, an executor."""

    def __init__(self, children: Children, directory: Path) -> None:
        stack = Stack(children, directory)
        self.secret = stack.secret_file.read_bytes()
        manager, self.manager, pages = stack.start_manager()
        engine = free_address()
        instance = {"instance": "w/0", "url": f"http://{engine}", "role": "both", "model": "paced"}
        agent = stack.start_agent("west-0", managers=[self.manager], cluster="west", engines=[instance])
        stack.await_agent(agent)
        command = [sys.executable, "-m", "tools.paced_engine", "--socket", str(agent.socket), "--model", "paced"]
        served = children.start("engine", [*command, "--listen", engine, "--instance", "w/0"])
        gateway = free_address()
        router, door = stack.start_router(
            {"managers": [self.manager], "ext_proc_listen": gateway, "probe_interval": "100ms"}
        )
        beside, sidecar, status = stack.start_sidecar(engine_url=f"http://{engine}")
        self.children: list[Child] = [manager, agent.child, served, router, beside]
        self.socket = agent.socket
        self.pages = {"manager": f"{pages}/healthz", "agent": f"{agent.status_url}/healthz"}
        self.pages |= {"router": f"{door}/health", "sidecar": f"http://{status}/healthz"}
        self.http = [url.removeprefix("http://").partition("/")[0] for url in self.pages.values()] + [sidecar]
        self.http2 = [self.manager, gateway]
        self.wire, self.gateway = agent.wire, gateway
        for address in (*self.http, *self.http2, self.wire):
            wait_until(functools.partial(is_taken, address), seconds=120, what=address)
        wait_until(lambda: is_answering(self.pages["router"]), seconds=120, what="an engine that serves")

    def check(self) -> None:
        """Everybody lives, answers, and has met nothing unforeseen."""
        for child in self.children:
            assert child.is_alive(), f"{child.name}:\n{child.tail(3)[-3000:]}"
            unforeseen = [
                line[:3000] for line in child.log.read_text(errors="replace").splitlines() if "Traceback" in line
            ]
            assert not unforeseen, f"{child.name}: {len(unforeseen)} times, first:\n{unforeseen[0]}"
        for name, url in self.pages.items():
            wait_until(functools.partial(is_answering, url), what=f"an honest answer of the {name}")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("noise")
    with Children(directory) as children:
        yield Target(children, directory)


def _talk(sock: socket.socket, words: bytes, *, leaves: bool = True) -> bytes:
    """Return the answer up to a close or a pause. With `leaves` the connection is half-closed first."""
    sock.settimeout(SECONDS if leaves else PATIENCE_SECONDS)
    parts = []
    with contextlib.suppress(OSError):
        sock.sendall(words)
        if leaves:
            sock.shutdown(socket.SHUT_WR)
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def _at(address: str, words: bytes, *, leaves: bool = True) -> bytes:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        return _talk(sock, words, leaves=leaves)


def _http(target: Target, chance: random.Random) -> None:
    for address in target.http:
        words = noise.http_request(chance)
        assert b" 500 " not in _at(address, words, leaves=chance.random() < 0.5).partition(b"\r\n")[0], (address, words)


def _http2(target: Target, chance: random.Random) -> None:
    for address in target.http2:
        _at(address, noise.http2_frames(chance))


def _wire(target: Target, chance: random.Random) -> None:
    hello = encode_hello(Hello(chance.choice(noise.WORDS[:6]), chance.randbytes(32), (1,), ()))
    _at(target.wire, noise.changed(chance, hello) + chance.randbytes(chance.randrange(100)))


def _engine(target: Target, chance: random.Random) -> None:
    """Somebody at the agent's own socket, who attaches now and then."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(target.socket))
        _talk(sock, (ATTACH if chance.random() < 0.5 else b"") + noise.length_prefixed(chance, HONEST))


def _calls(target: Target, chance: random.Random, channel: grpc.Channel) -> None:
    """Each of the manager's methods, asked by somebody who has the secret."""
    for method in SERVICE.methods:
        who = credentials(chance.choice(NAMES), target.secret)
        sent = [noise.message(chance, method.input_type) for _ in range(1 + 2 * method.client_streaming)]
        words = [noise.changed(chance, message.SerializeToString()) for message in sent]
        fault = _fault_of(functools.partial(_called, channel, method, words, who))
        assert not fault, (method.name, sent, fault)


def _called(
    channel: grpc.Channel, method: MethodDescriptor, words: list[bytes], who: tuple[tuple[str, str], ...]
) -> None:
    path = f"/{SERVICE_NAME}/{method.name}"
    if method.client_streaming:
        answered = channel.stream_stream(path)(iter(words), timeout=SECONDS, metadata=who)
    elif method.server_streaming:
        answered = channel.unary_stream(path)(words[0], timeout=SECONDS, metadata=who)
    else:
        channel.unary_unary(path)(words[0], timeout=SECONDS, metadata=who)
        return
    next(answered, None)
    answered.cancel()


def _fault_of(call: Callable[[], object]) -> str:
    """Return the failure of the server; empty if it answered, refused, or was late."""
    try:
        call()
    except grpc.RpcError as error:
        return f"{error.details()}" if error.code() in FAULTS else ""
    return ""


def _gateway(channel: grpc.Channel, chance: random.Random) -> None:
    """Send malformed messages to the gateway's method."""
    process = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")
    sent = [
        noise.changed(
            chance, noise.message(chance, external_processor_pb2.ProcessingRequest.DESCRIPTOR).SerializeToString()
        )
        for _ in range(3)
    ]
    fault = _fault_of(lambda: list(process(iter(sent), timeout=SECONDS)))
    assert not fault, (sent, fault)


def _make_noise(target: Target, *, seed: int, num_rounds: int) -> None:
    chance = random.Random(seed)
    with grpc.insecure_channel(target.manager) as manager, grpc.insecure_channel(target.gateway) as gateway:
        for _ in range(num_rounds):
            for part in (_http, _http2, _wire, _engine):
                part(target, chance)
            _calls(target, chance, manager)
            _gateway(gateway, chance)


@pytest.mark.timeout(300)
def test_all_processes_listen_on_loopback_by_default(target: Target) -> None:
    found = {child.name: listening_of(child) for child in target.children}
    assert {name: sum(socket.kind.startswith("tcp") for socket in sockets) for name, sockets in found.items()} == {
        "manager": 2,  # The embedded Redis listens at a Unix socket.
        "agent-west-0": 2,
        "engine": 1,
        "router": 2,
        "sidecar": 2,
    }
    assert [socket for sockets in found.values() for socket in sockets if socket.is_beyond_loopback] == []


@pytest.mark.timeout(300)
def test_noise_is_refused_without_harm(target: Target) -> None:
    _make_noise(target, seed=1, num_rounds=3)
    target.check()


@pytest.mark.soak  # About 30 inputs per round, half a minute each.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 6))
def test_much_noise_is_refused_without_harm(target: Target, seed: int) -> None:
    _make_noise(target, seed=seed, num_rounds=400)
    target.check()
