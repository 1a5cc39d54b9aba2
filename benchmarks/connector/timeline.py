"""Where the time of a request goes that is prefilled over distance: moments since it was asked, from the logs of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from benchmarks.connector.sites import Sites, logged

SENT = ("accepted_seconds", "first_layer_seconds", "first_acknowledged_seconds", "forward_ended_seconds")


def timeline(sites: Sites, asked: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
    """What happened when, of requests that are each given as (when it was asked, seconds to its first token)."""
    sent = [its for its in logged(sites.far.child, "transfer.complete") if its["direction"] == "out"]
    came = [its for its in logged(sites.near.child, "transfer.complete") if its["direction"] == "in"]
    loaded = logged(sites.decode.child, "request.received")
    moments: dict[str, list[float]] = {}
    for began, seconds in asked:
        for name, moment in _moments(began, seconds, sent, came, loaded).items():
            moments.setdefault(name, []).append(moment)
    return moments


def _moments(
    began: float,
    seconds: float,
    sent: Iterable[dict[str, Any]],
    came: Iterable[dict[str, Any]],
    loaded: Iterable[dict[str, Any]],
) -> dict[str, float]:
    out = next(its for its in sent if _time(its) > began)
    opened = _time(out) - out["ended_seconds"] - began
    found = {"opened": opened} | {name.removesuffix("_seconds"): opened + out[name] for name in SENT}
    found["whole_at_receiver"] = _time(next(its for its in came if _time(its) > began)) - began
    found["loaded"] = _time(next(its for its in loaded if _time(its) > began)) - began
    beyond = (
        opened + seconds - found["forward_ended"]
    )  # what the request took beside its own prefill, however long that was
    return found | {"first_token": seconds, "beyond_prefill": beyond}


def _time(line: dict[str, Any]) -> float:
    """Return seconds since the epoch at which a line was written."""
    return datetime.fromisoformat(line["time"]).timestamp()
