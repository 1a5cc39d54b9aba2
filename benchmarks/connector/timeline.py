"""Timeline of a remotely prefilled request, from the logs of all processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from benchmarks.connector.sites import Sites, logged

SENT = ("accepted_seconds", "first_layer_seconds", "first_acknowledged_seconds", "forward_ended_seconds")


def timeline(sites: Sites, asked: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
    """Return the timeline of requests, each given as (start, seconds to the first token)."""
    sent = [item for item in logged(sites.far.child, "transfer.complete") if item["direction"] == "out"]
    came = [item for item in logged(sites.near.child, "transfer.complete") if item["direction"] == "in"]
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
    out = next(item for item in sent if _time(item) > began)
    opened = _time(out) - out["ended_seconds"] - began
    found = {"opened": opened} | {name.removesuffix("_seconds"): opened + out[name] for name in SENT}
    found["whole_at_receiver"] = _time(next(item for item in came if _time(item) > began)) - began
    found["loaded"] = _time(next(item for item in loaded if _time(item) > began)) - began
    beyond = opened + seconds - found["forward_ended"]  # Seconds beyond the request's own prefill.
    return found | {"first_token": seconds, "beyond_prefill": beyond}


def _time(line: dict[str, Any]) -> float:
    """Return seconds since the epoch at which a line was written."""
    return datetime.fromisoformat(line["time"]).timestamp()
