"""Measures one cell: conversations of two turns that begin at random, their second turns' TTFT and TPOT."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from statistics import fmean

import aiohttp

from prfaas.ppd.workloads import Cell
from prfaas.scheduler.ppd import Run


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI server. Prompts are token ids below `vocabulary`; they say nothing, and answers are as long as asked for."""

    url: str
    model: str
    vocabulary: int = 1000
    timeout_seconds: float = 30.0


@dataclass(frozen=True)
class Effort:
    """Conversations begin for `seconds`, at least `min_conversations` of them."""

    seconds: float = 10.0
    min_conversations: int = 3
    seed: int = 0


@dataclass(frozen=True)
class _Turn:
    token_ids: list[int]
    ttft_seconds: float
    tpot_seconds: float


class _TurnFailed(Exception):
    """A turn ended in an error, early, or not in time."""


async def measure(session: aiohttp.ClientSession, endpoint: Endpoint, cell: Cell, effort: Effort) -> Run:
    """Averages over the second turns that succeeded; 0 where none did. Arrivals and prompts follow the seed and the cell."""
    source = random.Random(f"{effort.seed} {cell}")
    starts = _arrivals(source, cell.qps, effort)
    prompts = [[source.randrange(endpoint.vocabulary) for _ in range(cell.first[0] + cell.second[0])] for _ in starts]
    started = time.monotonic()
    conversations = [
        _conversation(session, endpoint, cell, prompt=prompt, at=started + start)
        for start, prompt in zip(starts, prompts, strict=True)
    ]
    turns = [turn for turn in await asyncio.gather(*conversations) if turn is not None]
    ttft = fmean(turn.ttft_seconds for turn in turns) if turns else 0.0
    tpot = fmean(turn.tpot_seconds for turn in turns) if turns else 0.0
    return Run(cell.context, cell.workload, cell.qps, ttft, tpot, len(turns) / len(starts))


def _arrivals(source: random.Random, qps: float, effort: Effort) -> list[float]:
    """Poisson arrivals, in seconds from now."""
    starts = [0.0]
    while starts[-1] < effort.seconds or len(starts) < effort.min_conversations:
        starts.append(starts[-1] + source.expovariate(qps))
    return starts[: max(effort.min_conversations, sum(start < effort.seconds for start in starts))]


async def _conversation(
    session: aiohttp.ClientSession, endpoint: Endpoint, cell: Cell, *, prompt: list[int], at: float
) -> _Turn | None:
    """The second turn; None where one of the two failed."""
    await asyncio.sleep(at - time.monotonic())
    num_first, num_answer = cell.first
    try:
        first = await _ask(session, endpoint, prompt[:num_first], num_answer)
        return await _ask(session, endpoint, prompt[:num_first] + first.token_ids + prompt[num_first:], cell.second[1])
    except _TurnFailed:
        return None


async def _ask(session: aiohttp.ClientSession, endpoint: Endpoint, prompt: list[int], num_tokens: int) -> _Turn:
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
            session.post(f"{endpoint.url}/v1/completions", json=body) as response,
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
    return _Turn(token_ids, moments[0] - started, (moments[-1] - moments[0]) / max(1, len(token_ids) - 1))


def _token_ids(line: bytes) -> list[int]:
    """The token ids of one line of an event stream."""
    if not line.startswith(b"data: {"):
        return []
    choices = json.loads(line[6:])["choices"]
    return [token_id for choice in choices for token_id in choice.get("token_ids") or []]
