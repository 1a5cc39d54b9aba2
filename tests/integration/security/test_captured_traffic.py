"""Traffic between two clusters, captured at the link: with TLS it shows no prompt, key or plain HTTP."""

import contextlib
import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from prfaas.console.authority import Authority
from tests.support.certificates import tls_record
from tests.support.secret_files import write_secret
from tests.support.waiting import wait_until
from tools.processes import Children
from tools.stack import Stack
from tools.wan import FAR, NEAR, Wan, WanShape, obstacle

pytestmark = [pytest.mark.root, pytest.mark.skipif(obstacle() is not None, reason=f"an emulated link {obstacle()}")]
MODEL, THRESHOLD_TOKENS = "paced", 500
End = Literal["near", "far"]
PROMPT = list(range(41_001, 42_001))
ENGINE_KEY, REQUEST_ID = "key-of-the-engines-0123456789", "request-with-a-marked-id"
PORTS: dict[End, tuple[str, str, str, str]] = {
    "near": (NEAR, "west", "pd", "both"),
    "far": (FAR, "east", "prfaas", "prefill"),
}
CAPTURE = """
import socket, sys
source = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
source.bind(("wan0", 0))
with open(sys.argv[1], "wb", buffering=0) as sink:
    while True:
        sink.write(source.recv(1 << 16))
"""
ASK = """
import json, sys, urllib.request
url, body, headers = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
request = urllib.request.Request(url, body.encode() or None, headers)
with urllib.request.urlopen(request, timeout=30) as response:
    print(json.dumps([response.read().decode(), dict(response.headers)]))
"""


class TwoClusters:
    """Manager, router and cluster "west" at the near end of a link, cluster "east" at its far end."""

    def __init__(self, wan: Wan, directory: Path) -> None:
        self.wan = wan
        self.capture = directory / "captured"
        self.router = f"http://{NEAR}:8080"

    def run(self, end: End, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command at one end of the link."""
        return subprocess.run([*self.wan.inside(end), *command], capture_output=True, text=True, check=False)

    def ask(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> list[Any] | None:
        """Return the answer and the headers of the router; None if it refuses."""
        told = {"Content-Type": "application/json", **headers}
        sent = "" if body is None else json.dumps(body)
        ran = self.run("near", sys.executable, "-c", ASK, self.router + path, sent, json.dumps(told))
        return None if ran.returncode else list(json.loads(ran.stdout))


@contextlib.contextmanager
def _two_clusters(directory: Path, *, encrypted: bool) -> Iterator[TwoClusters]:
    authority = Authority(directory)
    key = write_secret(directory / "engine.key", ENGINE_KEY)

    def security(name: str, *hosts: str) -> dict[str, Any]:
        return {"tls": tls_record(authority.issue(name, hosts=hosts))} if encrypted else {"insecure_plaintext": True}

    with contextlib.ExitStack() as stack:
        wan = stack.enter_context(Wan(WanShape(1e9, 0.02)))
        children = {end: stack.enter_context(Children(directory, inside=wan.inside(end))) for end in PORTS}
        site = TwoClusters(wan, directory)
        children["near"].start("capture", [sys.executable, "-c", CAPTURE, str(site.capture)])
        near = Stack(children["near"], directory)
        _, grpc, _ = near.start_manager(
            listen=f"{NEAR}:7410",
            http_listen=f"{NEAR}:7411",
            threshold_tokens=THRESHOLD_TOKENS,
            redis_directory=str(directory / "redis"),
            **security("manager", NEAR),
        )
        for end, (host, cluster, kind, role) in PORTS.items():
            url = "http://127.0.0.1:8000" if encrypted else f"http://{host}:8000"
            engine = {"instance": f"{cluster}/0", "url": url, "role": role, "model": MODEL}
            agent = Stack(children[end], directory).start_agent(
                cluster,
                listen=f"{host}:7400",
                status_listen="127.0.0.1:7401",
                cluster=cluster,
                cluster_kind=kind,
                managers=[grpc],
                engines=[engine | ({"tls_listen": f"{host}:8443"} if encrypted else {})],
                **security(cluster, host),
            )
            command = [sys.executable, "-m", "tools.paced_engine", "--socket", str(agent.socket), "--model", MODEL]
            command += ["--listen", url.removeprefix("http://"), "--instance", f"{cluster}/0"]
            children[end].start(f"engine-{cluster}", command)
        settings = {"managers": [grpc], "cluster": "west", "listen": f"{NEAR}:8080", "engine_api_key_file": str(key)}
        settings |= {"manager_timeout": "10s", **security("router", NEAR)}
        settings |= {"engine_tls": "deployment"} if encrypted else {}
        keys = write_secret(directory / "clients", "key-of-a-client default\n")
        operators = write_secret(directory / "operators", "key-of-an-operator\n")
        near.start_router(settings | {"api_keys_file": str(keys), "operator_keys_file": str(operators)})
        wait_until(lambda: _sees_both_engines(site), what="both engines at the router")
        yield site


def _sees_both_engines(site: TwoClusters) -> bool:
    answer = site.ask("/health", Authorization="Bearer key-of-an-operator")
    return answer is not None and json.loads(answer[0])["instances"] == {"west/0": True, "east/0": True}


def _ask_remotely(site: TwoClusters) -> None:
    """Send a prompt until the other cluster has prefilled it."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
    headers = {"Authorization": "Bearer key-of-a-client", "X-Request-Id": REQUEST_ID}

    def went_remotely() -> bool:
        answer = site.ask("/v1/completions", body, **headers)
        return (
            answer is not None and answer[1].get("x-prfaas-route") == "remote" and "x-prfaas-fallback" not in answer[1]
        )

    wait_until(went_remotely, what="a remote answer")


def _found(captured: bytes) -> set[str]:
    """Return what a capture reveals."""
    revealing: dict[str, Sequence[bytes]] = {
        "token ids": [
            b"41001,41002",
            b"41001, 41002",
            struct.pack("<4I", *PROMPT[:4]),
            struct.pack("<4q", *PROMPT[:4]),
        ],
        "text": [REQUEST_ID.encode()],
        "key": [ENGINE_KEY.encode(), b"key-of-a-client"],
        "plain HTTP": [b" HTTP/1.1\r\n", b"HTTP/1.1 200"],
    }
    return {name for name, signs in revealing.items() if any(sign in captured for sign in signs)}


def test_capture_between_clusters_with_tls_reveals_nothing(tmp_path: Path) -> None:
    with _two_clusters(tmp_path, encrypted=True) as site:
        _ask_remotely(site)
        assert site.capture.stat().st_size > 1 << 18, "the KV crossed the link"
        assert not _found(site.capture.read_bytes())
        for port, reason in (("8000", "engines listen on loopback alone"), ("8443", "the port needs a certificate")):
            scheme = "http" if port == "8000" else "https"
            ran = site.run("near", "curl", "-sk", "-m", "5", f"{scheme}://{FAR}:{port}/v1/models")
            assert (ran.returncode != 0, ran.stdout) == (True, ""), reason


def test_capture_between_clusters_without_tls_reveals_everything(tmp_path: Path) -> None:
    """The search above finds what is there."""
    with _two_clusters(tmp_path, encrypted=False) as site:
        _ask_remotely(site)
        assert _found(site.capture.read_bytes()) >= {"token ids", "text", "plain HTTP"}
