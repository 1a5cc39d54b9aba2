"""`make demo`: starts both clusters, sends the requests, prints the table; status 1 when a row is wrong."""

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
from tools.link import LinkShape, Relay
from tools.processes import Children, ProcessDied
from tools.stack import AgentProcess, EngineProcess, Stack, engine_flags, has_cuda
from tools.tiny_models import FAMILIES, VOCABULARY, make_model

DEFAULT_MODEL = "granite4h"  # a Mamba2 hybrid that vLLM runs in float32 on a CPU, so that "equal" means equal
THRESHOLD_TOKENS = 512
LINK = LinkShape(delay_seconds=0.005, bytes_per_second=50e6)
MAX_TRANSFER_BYTES = "64MiB"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--model", default=os.environ.get("MODEL") or DEFAULT_MODEL, choices=sorted(FAMILIES))
    parser.add_argument("--corrupt", action="store_true", default=os.environ.get("PRFAAS_DEMO_CORRUPT") == "1")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - started:5.1f} s] {text}\n")
        sys.stderr.flush()

    try:
        with tempfile.TemporaryDirectory(prefix="prfaas-demo-") as directory:
            rows = _play(Path(directory), arguments.model, corrupt=arguments.corrupt, say=say)
    except KeyboardInterrupt:
        say("interrupted; everything is stopped")
        return 130
    except (ProcessDied, RuntimeError) as error:
        say(f"failed: {error}")
        return 1
    sys.stdout.write(render(rows) + "\n")
    wrong = [row for row in rows if row.fault]
    say(f"{len(rows) - len(wrong)} of {len(rows)} rows are right")
    return 1 if wrong else 0


def _interrupt(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _play(directory: Path, family: str, *, corrupt: bool, say: Any) -> list[Row]:
    say(f"a tiny {family} model with random weights")
    model = make_model(family, directory / family)
    with Children(directory) as children:
        stack = Stack(children, directory)
        say("agents east and west")
        east, west = stack.start_agent("east"), stack.start_agent("west", reconnect_seconds="2s")
        stack.await_agent(east)
        stack.await_agent(west)
        with Relay(west.wire, LINK) as link:
            say("vLLM east (prefill) and west (decode, and prefill of short prompts); first start compiles, be patient")
            flags = engine_flags(chunk_tokens=CHUNK_TOKENS, cuda=has_cuda())
            engines = {
                "east": stack.start_engine("east", model, agent=east, role="kv_producer", extra=flags),
                "west": stack.start_engine("west", model, agent=west, role="kv_both", extra=flags),
            }
            for engine in engines.values():
                stack.await_server(engine.child, engine.url)
            router, url = stack.start_router(_router_config(family, engines, east, west, link.address))
            stack.await_server(router, url)
            say(f"router at {url}")
            scene = Scene(family, url, engines["west"].url, east.status_url, west.status_url, link, VOCABULARY, say)
            rows = run(scene, corrupt=corrupt)
        say("stopping everything")
    return rows


def _router_config(
    model: str, engines: dict[str, EngineProcess], east: AgentProcess, west: AgentProcess, wire_of_west: str
) -> dict[str, Any]:
    return {
        "threshold_tokens": THRESHOLD_TOKENS,
        "max_transfer_bytes": MAX_TRANSFER_BYTES,
        "clusters": [
            {
                "name": "east",
                "kind": "prfaas",
                "instances": [
                    {
                        "name": "east/0",
                        "url": engines["east"].url,
                        "role": "prefill",
                        "agent": east.name,
                        "wire": east.wire,
                    }
                ],
            },
            {
                "name": "west",
                "kind": "pd",
                "instances": [
                    {
                        "name": "west/0",
                        "url": engines["west"].url,
                        "role": "both",
                        "agent": west.name,
                        "wire": wire_of_west,
                    }
                ],
            },
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
