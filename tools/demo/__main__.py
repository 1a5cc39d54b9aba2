"""Command `make demo`: start two clusters, send requests and print a table. Exit with 1 if a row is wrong."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.demo.rows import CHUNK_TOKENS, Scene, run
from tools.demo.table import Row, render
from tools.free_ports import free_address
from tools.link import LinkShape, Relay
from tools.processes import Children, ProcessDied
from tools.stack import Stack, engine_flags, has_cuda
from tools.tiny_models import FAMILIES, VOCABULARY, make_model

# vLLM runs this Mamba2 hybrid in float32 on a CPU, so tokens must be exactly equal.
DEFAULT_MODEL = "granite4h"
THRESHOLD_TOKENS = 512
LINK = LinkShape(delay_seconds=0.005, bytes_per_second=50e6)
MAX_TRANSFER = "64MiB"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--model", default=os.environ.get("MODEL") or DEFAULT_MODEL, choices=sorted(FAMILIES))
    parser.add_argument("--corrupt", action="store_true", default=os.environ.get("PRFAAS_DEMO_CORRUPT") == "1")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    started = time.monotonic()

    def say(text: str) -> None:
        _check_interrupt()
        sys.stderr.write(f"[{time.monotonic() - started:5.1f} s] {text}\n")
        sys.stderr.flush()

    try:
        with tempfile.TemporaryDirectory(prefix="prfaas-demo-") as directory:
            rows = _play(Path(directory), arguments.model, corrupt=arguments.corrupt, say=say)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; all processes are stopped\n")
        return 130
    except (ProcessDied, RuntimeError) as error:
        say(f"failed: {error}")
        return 1
    sys.stdout.write(render(rows) + "\n")
    wrong = [row for row in rows if row.fault]
    say(f"{len(rows) - len(wrong)} of {len(rows)} rows are correct")
    return 1 if wrong else 0


_interrupts: list[int] = []


def _interrupt(number: int, frame: object) -> None:
    """Stop now. If Python swallows the exception, as between fork and exec, the next step stops."""
    _interrupts.append(number)
    if len(_interrupts) == 1:
        raise KeyboardInterrupt


def _check_interrupt() -> None:
    if _interrupts:
        raise KeyboardInterrupt


def _play(directory: Path, family: str, *, corrupt: bool, say: Any) -> list[Row]:
    say(f"a tiny {family} model with random weights")
    model = make_model(family, directory / family)
    with Children(directory, check=_check_interrupt) as children:
        stack = Stack(children, directory)
        say("manager with its own Redis")
        manager, grpc, manager_url = stack.start_manager(
            threshold_tokens=THRESHOLD_TOKENS, max_transfer_bytes=MAX_TRANSFER
        )
        stack.await_server(manager, manager_url, path="/healthz")
        wire_of_west = free_address()
        with Relay(wire_of_west, LINK) as link:
            say("agents east and west, a link between them")
            addresses = {"east": free_address(), "west": free_address()}
            common = {"managers": [grpc]}
            east = stack.start_agent("east", **common, **_node("east", "prfaas", "prefill", family, addresses))
            west = stack.start_agent(
                "west",
                **common,
                **_node("west", "pd", "both", family, addresses),
                listen=wire_of_west,
                advertise=link.address,
                silence_seconds="2s",
            )
            for agent in (east, west):
                stack.await_agent(agent)
            say("vLLM east (prefill) and west (decode, and prefill of short prompts); may take minutes")
            flags = engine_flags(chunk_tokens=CHUNK_TOKENS, cuda=has_cuda())
            engines = [
                stack.start_engine(
                    "east", model, agent=east, role="kv_producer", extra=flags, address=addresses["east"]
                ),
                stack.start_engine("west", model, agent=west, role="kv_both", extra=flags, address=addresses["west"]),
            ]
            for engine in engines:
                stack.await_server(engine.child, engine.url)
            router, url = stack.start_router({"managers": [grpc], "cluster": "west"})
            stack.await_server(router, url)
            say(f"router at {url}")
            scene = Scene(
                model=family,
                router_url=url,
                engine_urls={name: f"http://{address}" for name, address in addresses.items()},
                agent_urls={"east": east.status_url, "west": west.status_url},
                link=link,
                vocabulary=VOCABULARY,
                say=say,
            )
            try:
                rows = run(scene, corrupt=corrupt)
            except (RuntimeError, OSError) as error:
                raise RuntimeError(f"{error}\nend of the router's log:\n{router.tail()}") from error
        say("stopping all processes")
    return rows


def _node(cluster: str, kind: str, role: str, model: str, addresses: dict[str, str]) -> dict[str, Any]:
    """Return an agent's settings for its cluster and its engine."""
    engine = {"instance": f"{cluster}/0", "url": f"http://{addresses[cluster]}", "role": role, "model": model}
    return {"cluster": cluster, "cluster_kind": kind, "engines": [engine]}


if __name__ == "__main__":
    sys.exit(main())
