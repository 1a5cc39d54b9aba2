"""Deployment at both ends of the link: manager, router and cluster "west" near, "east" far, and endless traffic."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp

from prfaas.units import split_address
from tools.demo.client import get_json
from tools.demo_wan.bridge import forward_to_tcp
from tools.processes import Children
from tools.stack import Stack
from tools.wan import FAR, NEAR

MODEL = "paced"
THRESHOLD_TOKENS = 2000
NUM_SESSIONS = 12
REQUESTS_PER_SECOND = 3.0
ENGINES = {"west": f"{NEAR}:8000", "east": f"{FAR}:8000"}


def main() -> int:
    directory, socket, *inside_far = sys.argv[1:]
    signal.signal(signal.SIGTERM, _stop)
    try:
        with Children(Path(directory)) as near, Children(Path(directory), inside=inside_far) as far:
            router, page = _start(Path(directory), near, far)
            asyncio.run(_serve(router, page, Path(socket)))
    except KeyboardInterrupt:
        pass
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _start(directory: Path, near: Children, far: Children) -> tuple[str, str]:
    """Start all processes; return the URLs of the router and of the manager's pages."""
    stack = Stack(near, directory)
    manager, grpc, page = stack.start_manager(
        name="demo",
        listen=f"{NEAR}:7410",
        insecure_plaintext=True,
        threshold_tokens=THRESHOLD_TOKENS,
        deployment=os.path.relpath(Path(__file__).with_name("deployment.yaml")),  # Pages show this path.
    )
    stack.await_server(manager, page, path="/healthz")
    for name, children, address in (("west", near, NEAR), ("east", far, FAR)):
        kind, role = ("pd", "both") if name == "west" else ("prfaas", "prefill")
        engine = {"instance": f"{name}/0", "url": f"http://{ENGINES[name]}", "role": role, "model": MODEL}
        cluster: dict[str, Any] = {"cluster": name, "cluster_kind": kind, "engines": [engine], "managers": [grpc]}
        agent = Stack(children, directory).start_agent(name, listen=f"{address}:7400", **cluster)
        command = [sys.executable, "-m", "tools.paced_engine", "--socket", str(agent.socket), "--model", MODEL]
        command += ["--listen", ENGINES[name], "--instance", f"{name}/0"]
        stack.await_server(children.start(f"engine-{name}", command), f"http://{ENGINES[name]}")
    router, url = stack.start_router({"managers": [grpc], "cluster": "west"})
    stack.await_server(router, url)
    near.wait_until(router, lambda: len(get_json(f"{url}/health")["instances"]) == len(ENGINES), seconds=30.0)
    return url, page


async def _serve(router: str, page: str, socket: Path) -> None:
    """Serve the dashboard and send prompts."""
    host, port = split_address(page.removeprefix("http://"))
    server = await asyncio.start_unix_server(lambda reader, writer: forward_to_tcp(host, port, reader, writer), socket)
    async with server, aiohttp.ClientSession() as session, asyncio.TaskGroup() as requests:
        generator = random.Random(0)
        for number in itertools.count():
            requests.create_task(_ask(session, router, generator.randrange(NUM_SESSIONS), _length(generator), number))
            await asyncio.sleep(generator.expovariate(REQUESTS_PER_SECOND))


def _length(generator: random.Random) -> int:
    return min(24_000, max(64, round(generator.lognormvariate(7.3, 1.1))))


async def _ask(session: aiohttp.ClientSession, router: str, conversation: int, num_tokens: int, number: int) -> None:
    """Send a prompt; every third extends its conversation."""
    seed = conversation if number % 3 == 0 else NUM_SESSIONS + number
    prompt = [(seed * 7919 + position * 31) % 50_000 for position in range(num_tokens)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 32}
    headers = {"x-session-id": f"conversation-{conversation}"}
    try:
        async with session.post(f"{router}/v1/completions", json=body, headers=headers) as response:
            await response.read()
    except (aiohttp.ClientError, OSError) as error:
        print(f"demo-wan: {error!r}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
