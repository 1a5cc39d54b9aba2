"""Traffic against one system, and the times of every token."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.colocate.systems import MODEL, Endpoint


@dataclass
class Timing:
    """Times of one answer, in seconds of the monotonic clock."""

    num_prompt_tokens: int
    started: float
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.started

    def itls(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Return the gaps between tokens that overlap a period."""
        pairs = zip(self.tokens, self.tokens[1:], strict=False)
        return [later - sooner for sooner, later in pairs if later > begin and sooner < end]


@dataclass(frozen=True)
class Load:
    """Poisson arrivals with log-normal prompts, equal for all systems in a round."""

    rate: float
    seconds: float
    mean_prompt: int
    max_tokens: int

    def arrivals(self, seed: int) -> list[tuple[float, int]]:
        """Return seconds from the start and prompt lengths."""
        draw = random.Random(seed)
        arrivals, now = [], draw.expovariate(self.rate)
        while now < self.seconds:
            length = min(4 * self.mean_prompt, max(16, int(draw.lognormvariate(0.0, 0.6) * self.mean_prompt)))
            arrivals.append((now, length))
            now += draw.expovariate(self.rate)
        return arrivals


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]


def _is_token(line: bytes) -> bool:
    return line.startswith(b"data: {") and bool(json.loads(line[6:])["choices"])


class Client:
    """Requests with random tokens, so that no prefix is cached."""

    def __init__(self, endpoint: Endpoint, session: aiohttp.ClientSession, *, num_tokens: int, seed: int) -> None:
        self._endpoint, self._session = endpoint, session
        self._num_tokens, self._random = num_tokens, random.Random(seed)

    async def ask(self, num_prompt_tokens: int, max_tokens: int, timing: Timing | None = None) -> Timing:
        """Send one prompt and stamp its tokens, in `timing` if one is given."""
        prompt = [self._random.randrange(3, self._num_tokens) for _ in range(num_prompt_tokens)]
        timing = timing or Timing(num_prompt_tokens, 0.0)
        timing.started = time.monotonic()
        decode, prefill = self._endpoint.legs(prompt)
        legs = [self._leg(self._endpoint.url, prompt, max_tokens, decode, timing.tokens)]
        if self._endpoint.prefill_url:
            legs.append(self._leg(self._endpoint.prefill_url, prompt[:-1], 1, prefill, []))
        await asyncio.gather(*legs)
        return timing

    async def _leg(
        self, url: str, prompt: list[int], max_tokens: int, parameters: dict[str, Any], times: list[float]
    ) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        async with self._session.post(f"{url}/v1/completions", json=body | parameters | {"stream": True}) as response:
            response.raise_for_status()
            async for line in response.content:
                if _is_token(line):
                    times.append(time.monotonic())  # noqa: PERF401 (a cancelled answer keeps its times)

    async def long_prompt(self, *, batch: int, num_tokens: int) -> dict[str, float]:
        """Measure decode steps of a batch while a long prompt is computed."""
        timings = [Timing(64, 0.0) for _ in range(batch)]
        running = [asyncio.ensure_future(self.ask(timing.num_prompt_tokens, 2000, timing)) for timing in timings]
        await asyncio.sleep(2.0)
        prompt = await self.ask(num_tokens, 1)
        await asyncio.sleep(0.2)  # The gap in which the prompt ended closes.
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        itls = [itl for timing in timings for itl in timing.itls(prompt.started, prompt.tokens[0])]
        figures = {"itl_p99": percentile(itls, 99), "itl_median": percentile(itls, 50), "ttft": prompt.ttft}
        return {name: round(value, 4) for name, value in figures.items()}

    async def load(self, load: Load, *, seed: int) -> list[tuple[int, float, float, float]]:
        """Offer a load; return prompt tokens, TTFT, the 95th percentile of ITL and the longest of each request."""
        requests = []
        started = time.monotonic()
        for arrival, length in load.arrivals(seed):
            await asyncio.sleep(max(0.0, started + arrival - time.monotonic()))
            requests.append(asyncio.ensure_future(self.ask(length, load.max_tokens)))
        timings = await asyncio.gather(*requests)
        return [
            (
                item.num_prompt_tokens,
                round(item.ttft, 3),
                round(percentile(item.itls(), 95), 4),
                round(max(item.itls()), 4),
            )
            for item in timings
        ]
