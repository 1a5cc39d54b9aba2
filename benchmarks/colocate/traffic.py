"""Traffic against one system, and the times of every token."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.colocate.systems import MODEL, Endpoint

TTFT_SECONDS_PER_THOUSAND = 1.0


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

    def meets(self, itl_seconds: float, ttft_scale: float) -> bool:
        """Return whether the answer met both objectives; TTFT's grows with the prompt, as in RAPID-Serve."""
        thousands = -(-self.num_prompt_tokens // 1000)
        itls = self.itls()
        in_time = self.ttft <= ttft_scale * TTFT_SECONDS_PER_THOUSAND * thousands
        return in_time and (not itls or percentile(itls, 95) <= itl_seconds)


@dataclass(frozen=True)
class LongPrompt:
    """Decode steps during a long prompt."""

    itl_p99: float
    ttft: float


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

    async def ask(self, num_prompt_tokens: int, max_tokens: int) -> Timing:
        """Send one prompt and stamp its tokens."""
        prompt = [self._random.randrange(3, self._num_tokens) for _ in range(num_prompt_tokens)]
        timing = Timing(num_prompt_tokens, time.monotonic())
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
            times += [time.monotonic() async for line in response.content if _is_token(line)]

    async def long_prompt(self, *, batch: int, num_tokens: int, repeats: int) -> LongPrompt:
        """Measure decode steps of a batch while a long prompt is computed."""
        itls, ttfts = [], []
        for _ in range(repeats):
            running = [asyncio.ensure_future(self.ask(64, 200)) for _ in range(batch)]
            await asyncio.sleep(2.0)
            prompt = await self.ask(num_tokens, 1)
            ttfts.append(prompt.ttft)
            for timing in await asyncio.gather(*running):
                itls += timing.itls(prompt.started, prompt.tokens[0])
        return LongPrompt(percentile(itls, 99), statistics.median(ttfts))

    async def load(self, rate: float, *, seconds: float, mean_prompt: int, max_tokens: int) -> list[Timing]:
        """Send Poisson arrivals with log-normal prompts; return all timings."""
        requests = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            length = min(4 * mean_prompt, max(16, int(self._random.lognormvariate(0.0, 0.6) * mean_prompt)))
            requests.append(asyncio.ensure_future(self.ask(length, max_tokens)))
            await asyncio.sleep(self._random.expovariate(rate))
        return await asyncio.gather(*requests)
