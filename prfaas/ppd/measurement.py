"""Measurement of one cell of PPD's table: conversations of two turns with Poisson arrivals."""

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

from prfaas.ppd.table import FIRST_TURNS, MIN_SUCCESS_RATIO, NUM_TURNS, SECOND_TURNS, PpdRun
from prfaas.scheduler.ppd import TableCell
from prfaas.scheduler.route import Route

# Headers of a router of prfaas: the session's name, the route, and its reason.
SESSION_HEADER, ROUTE_HEADER = "x-session-id", "x-prfaas-route"
REASON_HEADER, FALLBACK_HEADER = "x-prfaas-reason", "x-prfaas-fallback"


@dataclass(frozen=True)
class MeasuredEndpoint:
    """OpenAI server to measure. Prompts are random token ids below `vocabulary`.

    A router of prfaas must answer second turns by `later_route`. Other servers do not state a route.
    """

    url: str
    model: str
    later_route: Route
    vocabulary: int = 1000
    timeout_seconds: float = 30.0


@dataclass(frozen=True)
class MeasurementEffort:
    """Extent of a measurement: conversations begin for `seconds`, at least `min_conversations` of them."""

    seconds: float = 10.0
    min_conversations: int = 3
    seed: int = 0


@dataclass(frozen=True)
class _AnsweredTurn:
    """One turn. Without a router of prfaas `route` is empty."""

    token_ids: list[int]
    ttft_seconds: float
    tpot_seconds: float
    route: str
    reason: str


@dataclass(frozen=True)
class CellMeasurement:
    """Run over the conversations whose second turns took the right route, and the reasons of the others."""

    run: PpdRun
    num_conversations: int
    strayed: Counter[str]

    @property
    def has_strayed(self) -> bool:
        """Return whether too many second turns took another route, so that the run measures something else."""
        return self.strayed.total() > (1 - MIN_SUCCESS_RATIO) * self.num_conversations


class _TurnFailed(Exception):
    """Turn that failed, ended early, or was late."""


async def measure(
    session: aiohttp.ClientSession, endpoint: MeasuredEndpoint, cell: TableCell, effort: MeasurementEffort
) -> CellMeasurement:
    """Return the averages over the second turns that succeeded; 0 if none did.

    Arrivals follow from the seed and the cell. Prompts are always new, so no earlier run has cached them.
    """
    starts = _arrivals(random.Random(f"{effort.seed} {cell}"), cell.qps / NUM_TURNS, effort)
    source = random.SystemRandom()
    num_tokens = FIRST_TURNS[cell.context_class][0] + SECOND_TURNS[cell.workload_type][0]
    prompts = [[source.randrange(endpoint.vocabulary) for _ in range(num_tokens)] for _ in starts]
    started = time.monotonic()
    conversations = [
        _converse(session, endpoint, cell, prompt=prompt, at=started + start)
        for start, prompt in zip(starts, prompts, strict=True)
    ]
    answered = [turn for turn in await asyncio.gather(*conversations) if turn is not None]
    turns = [turn for turn in answered if turn.route in ("", endpoint.later_route)]
    strayed = Counter(turn.reason for turn in answered if turn.route not in ("", endpoint.later_route))
    ttft = fmean(turn.ttft_seconds for turn in turns) if turns else 0.0
    tpot = fmean(turn.tpot_seconds for turn in turns) if turns else 0.0
    success_ratio = len(turns) / max(1, len(starts) - strayed.total())
    run = PpdRun(cell, ttft, tpot, success_ratio)
    return CellMeasurement(run, len(starts), strayed)


def _arrivals(source: random.Random, per_second: float, effort: MeasurementEffort) -> list[float]:
    """Return Poisson arrivals in seconds from now."""
    starts = [0.0]
    while starts[-1] < effort.seconds or len(starts) < effort.min_conversations:
        starts.append(starts[-1] + source.expovariate(per_second))
    return starts[: max(effort.min_conversations, sum(start < effort.seconds for start in starts))]


async def _converse(
    session: aiohttp.ClientSession, endpoint: MeasuredEndpoint, cell: TableCell, *, prompt: list[int], at: float
) -> _AnsweredTurn | None:
    """Return the second turn of a conversation; None if one of the turns failed. Both name the same session."""
    name = f"ppd-{secrets.token_hex(8)}"
    await asyncio.sleep(at - time.monotonic())
    num_first, num_answer = FIRST_TURNS[cell.context_class]
    try:
        first = await _ask(session, endpoint, prompt[:num_first], num_answer, name=name)
        later = prompt[:num_first] + first.token_ids + prompt[num_first:]
        return await _ask(session, endpoint, later, SECOND_TURNS[cell.workload_type][1], name=name)
    except _TurnFailed:
        return None


async def _ask(
    session: aiohttp.ClientSession, endpoint: MeasuredEndpoint, prompt: list[int], num_tokens: int, *, name: str
) -> _AnsweredTurn:
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
    times: list[float] = []
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
                    times.append(time.monotonic())
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
        raise _TurnFailed from error
    if not times:
        raise _TurnFailed
    tpot = (times[-1] - times[0]) / max(1, len(token_ids) - 1)
    return _AnsweredTurn(token_ids, times[0] - started, tpot, *_route_and_reason(response.headers))


def _route_and_reason(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the route and reason that a router states. A remote request that fell back was answered locally."""
    if fallback := headers.get(FALLBACK_HEADER):
        return "local", fallback
    return headers.get(ROUTE_HEADER, ""), headers.get(REASON_HEADER, "")


def _token_ids(line: bytes) -> list[int]:
    """Return the token ids in one line of an event stream."""
    if not line.startswith(b"data: {"):
        return []
    choices = json.loads(line[6:])["choices"]
    return [token_id for choice in choices for token_id in choice.get("token_ids") or []]
