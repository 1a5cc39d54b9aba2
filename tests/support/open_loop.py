"""Load at a fixed rate: requests arrive whether or not earlier ones have been answered."""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from tests.support.process_deployment import Outcome, ask, client, fresh_prompt


@dataclass(frozen=True)
class Answer:
    """One request: arrival in monotonic seconds, length of its prompt, and its answer."""

    asked_at: float
    num_tokens: int
    outcome: Outcome

    @property
    def ttft_seconds(self) -> float:
        return self.outcome.ttft_seconds


class OpenLoop:
    """Requests to one router."""

    def __init__(self, url: str, *, interval_seconds: float, lengths: Iterable[int], seed: int | None = None) -> None:
        """`seed` makes the intervals random with that mean."""
        self._url = url
        self._interval_seconds = interval_seconds
        self._lengths = itertools.cycle(lengths)
        self._random = None if seed is None else random.Random(seed)
        self.answers: list[Answer] = []
        self.num_asked = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send requests within the block, and wait for all answers at its end."""
        async with client() as session, asyncio.TaskGroup() as requests:

            async def arrive() -> None:
                due = time.monotonic()
                while True:
                    requests.create_task(ask_one(next(self._lengths)))
                    self.num_asked += 1
                    due += self._interval_seconds * (self._random.expovariate(1) if self._random else 1)
                    await asyncio.sleep(due - time.monotonic())

            async def ask_one(length: int) -> None:
                asked_at = time.monotonic()
                outcome = await ask(session, self._url, fresh_prompt(length), num_tokens=16)
                self.answers.append(Answer(asked_at, length, outcome))

            arrivals = asyncio.ensure_future(arrive())
            try:
                yield
            finally:
                arrivals.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await arrivals
