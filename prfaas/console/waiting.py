"""Progress messages while a change of a node waits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prfaas.console.tables import nodes_of
from prfaas.errors import PrfaasError

EVERY_SECONDS = 3.0


@contextmanager
def report_wait(node: str, state: Callable[[], Mapping[str, Any]], *, seconds: float) -> Iterator[None]:
    """Report what a change waits for: once, and repeatedly on a terminal. `state` returns the managers' /state."""
    ended = threading.Event()
    if seconds:  # The thread is a daemon, since the page may hang longer than the change takes.
        threading.Thread(
            target=_print_progress, args=(node, state, time.monotonic() + seconds, ended), daemon=True
        ).start()
    try:
        yield
    finally:
        ended.set()


def _print_progress(node: str, state: Callable[[], Mapping[str, Any]], ends_at: float, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            what = awaited(state(), node)
        except (PrfaasError, OSError) as error:
            what = f"the load is unknown: {error}"
        if ended.is_set():
            return
        sys.stderr.write(f"prfaas: {node}: waiting, {max(0.0, ends_at - time.monotonic()):.1f} s at most: {what}\n")
        if not sys.stderr.isatty():
            return
        ended.wait(EVERY_SECONDS)


def awaited(state: Mapping[str, Any], name: str) -> str:
    """Return what keeps the engines of a node busy."""
    node = next((node for node in nodes_of(state) if node["node"]["name"] == name), None)
    if node is None:
        return "the manager does not know the node"
    loads = {load["instance"]: load for load in node.get("engines", [])}
    waits = [_awaited(engine, loads.get(engine["instance"])) for engine in node["node"].get("engines", [])]
    return "; ".join(filter(None, waits)) or "nothing runs there; requests on the way must arrive first"


def _awaited(engine: Mapping[str, Any], load: Mapping[str, Any] | None) -> str:
    if load is None:
        return f"{engine['instance']} does not report its load, at {engine['url']}"
    number = load.get("num_running", 0) + load.get("num_waiting", 0)
    return f"{engine['instance']} has {number} requests" if number else ""
