"""The dashboard's live data: a sample each second, and for whoever watches one document twice as often for all of them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

from prfaas import metrics
from prfaas.manager.dashboard.history import History, PathSample, Sample
from prfaas.manager.dashboard.overview import Overview, decision_counts
from prfaas.manager.routing.outcomes import outcome_counts, ttft_totals

TICK_SECONDS = 0.5  # agents report changes after as long: what they know is on the page within two seconds, mostly one
TICKS_A_SAMPLE = 2


MAX_WATCHERS = 64  # each is a connection, and a document of tens of KB twice a second


class Feed:
    """Steps while `run` runs. Slow watchers miss documents, never the latest."""

    def __init__(self, overview: Overview) -> None:
        self._overview = overview
        self._history = History()
        self._event = b""
        self._number = 0
        self._num_watchers = 0
        self._is_closed = False
        self._ticked = asyncio.Condition()

    async def run(self) -> None:
        """Sample until cancelled."""
        for tick in itertools.count():
            if tick % TICKS_A_SAMPLE == 0:
                self._history.add(self._sample())
            if self._num_watchers:
                await self._publish()
            await asyncio.sleep(TICK_SECONDS)

    async def _publish(self) -> None:
        async with self._ticked:
            self._event = self._now()
            self._number += 1
            self._ticked.notify_all()

    def enter(self) -> bool:
        """Take a place among the watchers, to be given back by `leave`; False: there is none."""
        if self._num_watchers >= MAX_WATCHERS:
            return False
        self._count(1)
        return True

    def leave(self) -> None:
        """Give a place back."""
        self._count(-1)

    async def close(self) -> None:
        """End every `events`."""
        self._is_closed = True
        async with self._ticked:
            self._ticked.notify_all()

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events until `close`: `history` once, then `now` at once and at each tick."""
        yield _event("history", {"samples": self._history.drawn()})
        yield self._now()
        while await self._ticks():
            yield self._event

    def _count(self, change: int) -> None:
        self._num_watchers += change
        metrics.DASHBOARD_WATCHERS.set(self._num_watchers)

    async def _ticks(self) -> bool:
        """True at the next tick, False when there will be none."""
        async with self._ticked:
            number = self._number
            await self._ticked.wait_for(lambda: self._number != number or self._is_closed)
        return not self._is_closed

    def _now(self) -> bytes:
        document = self._overview.document()
        return _event("now", document | {"sample": self._history.latest(), "changes": self._history.changes()})

    def _sample(self) -> Sample:
        its = self._overview
        plan, live = its.world.plan, its.world.live()
        return Sample(
            at=its.wall_clock(),
            threshold_tokens=its.routing.threshold_tokens,
            plan_version=plan.version if plan else 0,
            plan_limit=plan.limit if plan else "",
            paths={_name(path): _path_sample(path) for path in its.path_records()},
            counts={f"{count['route']}/{count['reason']}": count["count"] for count in decision_counts()},
            answered={
                f"{count['route']}/{count['reason']}/{count['outcome']}": count["count"] for count in outcome_counts()
            },
            ttft=ttft_totals(),
            roles={engine.instance: engine.role for member in live for engine in member.node.engines},
            draining=dict(plan.draining.items()) if plan else {},
            nodes={member.node.name: member.node.cluster for member in live},
        )


def _name(path: dict[str, Any]) -> str:
    return f"{path['source']} → {path['destination']}"


def _path_sample(path: dict[str, Any]) -> PathSample:
    names = ("bytes_per_second", "capacity_bytes_per_second", "threshold_tokens", "multiplier", "cause", "is_down")
    return PathSample(**{name: path[name] for name in names})


def _event(name: str, document: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(document, separators=(',', ':'))}\n\n".encode()
