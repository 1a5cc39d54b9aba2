"""Measures one cell: conversations of two turns that begin at random, their second turns' TTFT and TPOT."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

import aiohttp

from prfaas.ppd.workloads import NUM_TURNS, TableCell
from prfaas.scheduler.ppd import MIN_SUCCESS_RATIO, PpdRun
from prfaas.scheduler.route import Route

# Of a front door of ours: what names a conversation, how a request went, and why.
SESSION_HEADER, ROUTE_HEADER = "x-session-id", "x-prfaas-route"
REASON_HEADER, FALLBACK_HEADER = "x-prfaas-reason", "x-prfaas-fallback"


@dataclass(frozen=True)
class MeasuredEndpoint:
    """An OpenAI server. Prompts are token ids below `vocabulary`; they say nothing, and answers are as long as asked for.

    A front door of ours is to answer second turns by `later_route`; what else answers does not say how it does.
    """

    url: str
    model: str
    later_route: Route
    vocabulary: int = 1000
    timeout_seconds: float = 30.0


@dataclass(frozen=True)
class MeasurementEffort:
    """Conversations begin for `seconds`, at least `min_conversations` of them."""

    seconds: float = 10.0
    min_conversations: int = 3
    seed: int = 0


@dataclass(frozen=True)
class _Turn:
    token_ids: list[int]
    ttft_seconds: float
    tpot_seconds: float
    route: str  # as the door says; empty: it does not
    reason: str  # the door's, or why it could not do as it had decided


@dataclass(frozen=True)
class CellMeasurement:
    """A run over the conversations whose second turns went as they should, and the reasons of the others."""

    run: PpdRun
    num_conversations: int
    strayed: Counter[str]

    @property
    def is_astray(self) -> bool:
        """So many went otherwise that the door does not do what is to be measured."""
        return self.strayed.total() > (1 - MIN_SUCCESS_RATIO) * self.num_conversations


class _TurnFailed(Exception):
    """A turn ended in an error, early, or not in time."""


async def measure(
    session: aiohttp.ClientSession, endpoint: MeasuredEndpoint, cell: TableCell, effort: MeasurementEffort
) -> CellMeasurement:
    """Averages over the second turns that succeeded; 0 where none did.

    Arrivals follow the seed and the cell. Prompts are new each time: nothing of them is cached, by the other way or before.
    """
    starts = _arrivals(random.Random(f"{effort.seed} {cell}"), cell.qps / NUM_TURNS, effort)
    source = random.SystemRandom()
    prompts = [[source.randrange(endpoint.vocabulary) for _ in range(cell.first[0] + cell.second[0])] for _ in starts]
    started = time.monotonic()
    conversations = [
        _conversation(session, endpoint, cell, prompt=prompt, at=started + start)
        for start, prompt in zip(starts, prompts, strict=True)
    ]
    answered = [turn for turn in await asyncio.gather(*conversations) if turn is not None]
    turns = [turn for turn in answered if turn.route in ("", endpoint.later_route)]
    strayed = Counter(turn.reason for turn in answered if turn.route not in ("", endpoint.later_route))
    num_others = len(starts) - strayed.total()
    ttft = fmean(turn.ttft_seconds for turn in turns) if turns else 0.0
    tpot = fmean(turn.tpot_seconds for turn in turns) if turns else 0.0
    run = PpdRun(cell.context, cell.workload, cell.qps, ttft, tpot, len(turns) / max(1, num_others))
    return CellMeasurement(run, len(starts), strayed)


def _arrivals(source: random.Random, per_second: float, effort: MeasurementEffort) -> list[float]:
    """Poisson arrivals, in seconds from now."""
    starts = [0.0]
    while starts[-1] < effort.seconds or len(starts) < effort.min_conversations:
        starts.append(starts[-1] + source.expovariate(per_second))
    return starts[: max(effort.min_conversations, sum(start < effort.seconds for start in starts))]


async def _conversation(
    session: aiohttp.ClientSession, endpoint: MeasuredEndpoint, cell: TableCell, *, prompt: list[int], at: float
) -> _Turn | None:
    """The second turn; None where one of the two failed. Both name their conversation, so that the second finds its KV."""
    name = f"ppd-{secrets.token_hex(8)}"
    await asyncio.sleep(at - time.monotonic())
    num_first, num_answer = cell.first
    try:
        first = await _ask(session, endpoint, prompt[:num_first], num_answer, name=name)
        later = prompt[:num_first] + first.token_ids + prompt[num_first:]
        return await _ask(session, endpoint, later, cell.second[1], name=name)
    except _TurnFailed:
        return None


async def _ask(
    session: aiohttp.ClientSession, endpoint: MeasuredEndpoint, prompt: list[int], num_tokens: int, *, name: str
) -> _Turn:
    body = {
        "model": endpoint.model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    started = time.monotonic()
    moments: list[float] = []
    token_ids: list[int] = []
    try:
        async with (
            asyncio.timeout(endpoint.timeout_seconds),
            session.post(f"{endpoint.url}/v1/completions", json=body, headers={SESSION_HEADER: name}) as response,
        ):
            if response.status != 200:
                raise _TurnFailed
            async for line in response.content:
                if new := _token_ids(line):
                    token_ids += new
                    moments.append(time.monotonic())
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
        raise _TurnFailed from error
    if not moments:
        raise _TurnFailed
    tpot = (moments[-1] - moments[0]) / max(1, len(token_ids) - 1)
    return _Turn(token_ids, moments[0] - started, tpot, *_way(response.headers))


def _way(headers: Mapping[str, str]) -> tuple[str, str]:
    """By which route a front door of ours answered, and why. A remote request that fell back was answered locally."""
    if fallback := headers.get(FALLBACK_HEADER):
        return "local", fallback
    return headers.get(ROUTE_HEADER, ""), headers.get(REASON_HEADER, "")


def _token_ids(line: bytes) -> list[int]:
    """Return the token ids of one line of an event stream."""
    if not line.startswith(b"data: {"):
        return []
    choices = json.loads(line[6:])["choices"]
    return [token_id for choice in choices for token_id in choice.get("token_ids") or []]
