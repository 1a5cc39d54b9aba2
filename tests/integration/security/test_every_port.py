"""With mutual TLS on, every port beyond loopback refuses plain, foreign, expired and revoked clients, counts them, and
survives noise."""

import contextlib
import random
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from prfaas.console.authority import DAY, Authority, IssuedCertificate
from tests.integration.security import noise
from tests.integration.security.listening import is_taken, listening_of
from tests.support.certificates import tls_record
from tests.support.router import OPERATOR_KEY
from tests.support.secret_files import write_secret
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.free_ports import free_address
from tools.processes import Child, Children
from tools.stack import Stack

Kind = Literal["plain", "nobody", "foreign", "expired", "revoked"]
KINDS: dict[Kind, str] = {
    "plain": "tls_none",
    "nobody": "tls_untrusted",
    "foreign": "tls_untrusted",
    "expired": "tls_expired",
    "revoked": "tls_revoked",
}
GET = b"GET /healthz HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # Preface and empty SETTINGS.


HTTP2_HEADER_BYTES = 9
NOISE_SECONDS = 0.1  # Wait for an answer to an incomplete request.


@dataclass(frozen=True)
class Port:
    """Port: the first bytes of a client, and the metric that counts refusals, on the /metrics page of `counted_by`."""

    hello: bytes
    speaks: str
    metric: str
    counted_by: str


PORTS = {
    "wire": Port(b"\0" * 64, "", "prfaas_agent_wire_refusals_total", "agent pages"),
    "agent pages": Port(GET, "http/1.1", "prfaas_agent_pages_refusals_total", "agent pages"),
    "manager": Port(HTTP2, "h2", 'prfaas_manager_tls_refusals_total{port="grpc"', "manager pages"),
    "manager pages": Port(GET, "http/1.1", 'prfaas_manager_tls_refusals_total{port="pages"', "manager pages"),
    "gateway": Port(HTTP2, "h2", "prfaas_router_gateway_refusals_total", "router"),
    "router": Port(GET.replace(b"healthz", b"health"), "http/1.1", "prfaas_router_client_tls_refusals_total", "router"),
    "sidecar": Port(GET, "http/1.1", 'prfaas_sidecar_tls_refusals_total{port="listen"', "sidecar pages"),
    "sidecar pages": Port(GET, "http/1.1", 'prfaas_sidecar_tls_refusals_total{port="status_listen"', "sidecar pages"),
}


class Fortress:
    """One of each component with certificates, listening at every address of this machine."""

    def __init__(self, children: Children, directory: Path) -> None:
        (directory / "foreign").mkdir()
        authority, foreign = Authority(directory), Authority(directory / "foreign")
        self.issued: dict[str, IssuedCertificate] = {
            "valid": authority.issue("somebody"),
            "expired": authority.issue("late", valid_for=-DAY),
            "revoked": authority.issue("traitor"),
            "foreign": foreign.issue("stranger"),
        }
        authority.revoke(self.issued["revoked"].serial)
        self._authority = authority
        self.operator_keys = directory / "operators"
        write_secret(self.operator_keys, OPERATOR_KEY)
        self.ports = {name: free_address().rpartition(":")[2] for name in PORTS}
        stack = Stack(children, directory)
        self.children = self._start(stack)
        for address in (f"127.0.0.1:{port}" for port in self.ports.values()):
            wait_until(partial(is_taken, address), seconds=120, what=address)

    def _tls(self, name: str) -> dict[str, str]:
        issued = self._authority.issue(name)
        return {**tls_record(issued), "revocations": str(issued.revocations)}

    def _start(self, stack: Stack) -> list[Child]:
        at = {name: f"0.0.0.0:{port}" for name, port in self.ports.items()}
        manager, _, _ = stack.start_manager(
            listen=at["manager"], http_listen=at["manager pages"], tls=self._tls("manager")
        )
        agent = stack.start_agent("west-0", listen=at["wire"], status_listen=at["agent pages"], tls=self._tls("west-0"))
        managers = [f"127.0.0.1:{self.ports['manager']}"]
        router, _ = stack.start_router(
            {
                "listen": at["router"],
                "ext_proc_listen": at["gateway"],
                "managers": managers,
                "operator_keys_file": str(self.operator_keys),
                "tls": self._tls("router"),
                "client_tls": self._tls("router-clients"),
            }
        )
        sidecar, *_ = stack.start_sidecar(
            listen=at["sidecar"], status_listen=at["sidecar pages"], tls=self._tls("sidecar")
        )
        return [manager, agent.child, router, sidecar]

    def talk(self, name: str, kind: str) -> bytes:
        """Return the answer to a client of some kind; nothing if it is refused."""
        port, address = PORTS[name], ("127.0.0.1", int(self.ports[name]))
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=PATIENCE_SECONDS) as sock:
            if kind == "plain":
                return _ask(sock, port.hello)
            with _client(self.issued.get(kind), port.speaks).wrap_socket(sock) as tls:
                return _ask(tls, port.hello, is_let_in=kind == "valid")
        return b""

    def count(self, name: str, reason: str) -> float:
        text = self._metrics(PORTS[name].counted_by)
        pattern = re.escape(PORTS[name].metric) + rf'.*reason="{reason}"\}} (\S+)'
        return sum(float(value) for value in re.findall(pattern, text))

    def _metrics(self, where: str) -> str:
        words = GET.replace(b"/healthz", b"/metrics")
        request = words.replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {OPERATOR_KEY}\r\n\r\n".encode())
        context, address = _client(self.issued["valid"], "http/1.1"), ("127.0.0.1", int(self.ports[where]))
        with socket.create_connection(address, timeout=PATIENCE_SECONDS) as sock, context.wrap_socket(sock) as tls:
            return _ask(tls, request).decode()


def _client(issued: IssuedCertificate | None, speaks: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if speaks:
        context.set_alpn_protocols([speaks])
    if issued is not None:
        context.load_cert_chain(issued.certificate, issued.key)
    return context


def _ask(sock: socket.socket, words: bytes, *, is_let_in: bool = False) -> bytes:
    """Return all that comes back; of HTTP/2, which stays open, what came within a second of silence or, where somebody is let
    in, the first frame."""
    stays_open = words.startswith(b"PRI")
    sock.sendall(words)
    sock.settimeout(1.0 if stays_open and not is_let_in else PATIENCE_SECONDS)
    received = b""
    with contextlib.suppress(OSError):
        while not (stays_open and len(received) >= HTTP2_HEADER_BYTES) and (part := sock.recv(65536)):
            received += part
    return received


@pytest.fixture(scope="module")
def fortress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    directory = tmp_path_factory.mktemp("fortress")
    with Children(directory) as children:
        yield Fortress(children, directory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PORTS)
def test_clients_without_a_valid_certificate_are_refused_and_counted(fortress: Fortress, name: str, kind: Kind) -> None:
    reason = KINDS[kind]
    before = fortress.count(name, reason)
    answer = fortress.talk(name, kind)
    assert not answer.startswith(b"HTTP") and b"\0\0\0\x04" not in answer[:8]
    wait_until(lambda: fortress.count(name, reason) > before, what=f"{reason} at {name}")


@pytest.mark.parametrize("name", [name for name, port in PORTS.items() if port.speaks == "http/1.1"])
def test_pages_answer_clients_with_a_certificate(fortress: Fortress, name: str) -> None:
    assert fortress.talk(name, "valid").startswith(b"HTTP/1.")


@pytest.mark.parametrize("name", [name for name, port in PORTS.items() if port.speaks == "h2"])
def test_calls_need_a_certificate(fortress: Fortress, name: str) -> None:
    assert fortress.talk(name, "valid")[3:4] == b"\x04", "its SETTINGS"


@pytest.mark.parametrize("name", PORTS)
def test_noise_with_and_without_a_certificate_is_refused_without_harm(fortress: Fortress, name: str) -> None:
    chance = random.Random(name)
    for _ in range(12):
        _say(fortress, name, noise.changed(chance, _client_hello(chance)) + chance.randbytes(chance.randrange(300)))
        made = (noise.http_request, noise.http2_frames, lambda source: source.randbytes(source.randrange(300)))
        _say(fortress, name, chance.choice(made)(chance), behind=True)
    for child in fortress.children:
        assert child.is_alive(), child.tail(30)
    if PORTS[name].speaks:
        assert fortress.talk(name, "valid")


def _client_hello(chance: random.Random) -> bytes:
    """Return the first words of a client that speaks TLS."""
    out = ssl.MemoryBIO()
    client = _client(None, chance.choice(("", "h2", "http/1.1"))).wrap_bio(ssl.MemoryBIO(), out)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


def _say(fortress: Fortress, name: str, words: bytes, *, behind: bool = False) -> None:
    """Send, hear a little, and leave; `behind` a handshake with a certificate that counts."""
    address = ("127.0.0.1", int(fortress.ports[name]))
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=PATIENCE_SECONDS) as sock:
        if not behind:
            _hear(sock, words)
            return
        with _client(fortress.issued["valid"], PORTS[name].speaks).wrap_socket(sock) as tls:
            _hear(tls, words)


def _hear(sock: socket.socket, words: bytes) -> None:
    sock.settimeout(NOISE_SECONDS)
    sock.sendall(words)
    while sock.recv(65536):
        pass


def test_no_other_port_is_beyond_loopback(fortress: Fortress) -> None:
    found = {socket.port for child in fortress.children for socket in listening_of(child) if socket.is_beyond_loopback}
    assert found == {int(port) for port in fortress.ports.values()}
