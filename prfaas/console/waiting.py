"""What an order on a node waits for, said while it waits."""

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
def told(node: str, state: Callable[[], Mapping[str, Any]], *, seconds: float) -> Iterator[None]:
    """Around an order that may take `seconds`: say at once, and on a terminal again and again, what it waits for; `state` is
    the managers' page."""
    ended = threading.Event()
    if seconds:  # a thread that nobody waits for: the page may hang longer than the order takes
        threading.Thread(target=_tell, args=(node, state, time.monotonic() + seconds, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _tell(node: str, state: Callable[[], Mapping[str, Any]], ends_at: float, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            what = awaited(state(), node)
        except (PrfaasError, OSError) as error:
            what = f"what runs there is not known: {error}"
        if ended.is_set():
            return
        sys.stderr.write(f"prfaas: {node}: waiting, {max(0.0, ends_at - time.monotonic()):.1f} s at most: {what}\n")
        if not sys.stderr.isatty():
            return
        ended.wait(EVERY_SECONDS)


def awaited(state: Mapping[str, Any], name: str) -> str:
    """Of each engine of a node what keeps it from being idle."""
    node = next((its for its in nodes_of(state) if its["node"]["name"] == name), None)
    if node is None:
        return "the manager has no word of it"
    loads = {its["instance"]: its for its in node.get("engines", [])}
    waits = [_awaited(its, loads.get(its["instance"])) for its in node["node"].get("engines", [])]
    return "; ".join(filter(None, waits)) or "nothing runs there; what is on its way to it must have arrived"


def _awaited(engine: Mapping[str, Any], load: Mapping[str, Any] | None) -> str:
    if load is None:
        return f"{engine['instance']} does not say what it runs, at {engine['url']}"
    number = load.get("num_running", 0) + load.get("num_waiting", 0)
    return f"{engine['instance']} has {number} requests" if number else ""
