"""A trace with the statistics of the public Mooncake trace of one hour (arXiv 2407.00079, 4.2), seeded.

It has 23,608 requests with 7,590 input and 182 output tokens on average, in blocks of 512 tokens. All requests share one
block. An LRU cache of 1,000 / 10,000 / 30,000 / 50,000 / unlimited blocks hits 30 / 40 / 48 / 50 / 51 % of the blocks.
Tool requests repeat one of a few long instructions. Sessions grow turn by turn.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

NUM_REQUESTS = 23_608
HOUR_SECONDS = 3_600.0
BLOCK_TOKENS = 512
MAX_INPUT_TOKENS = 128_000
_TOOL_RATIO = 0.62  # Share of tool requests; the rest are turns of sessions.
_NUM_TOOLS = 60
_MEAN_TURNS = 1.75
_MEAN_PAUSE_SECONDS = 350.0
_OUTPUT_TOKENS = 182


@dataclass(frozen=True)
class Request:
    """`blocks` names the full blocks of the prompt, `next_blocks` those that prompt and answer together add."""

    at_seconds: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    next_blocks: tuple[int, ...]

    @property
    def stored(self) -> tuple[int, ...]:
        return self.blocks + self.next_blocks


@dataclass
class _Conversation:
    tokens: int
    blocks: tuple[int, ...]
    turns_left: int


def read(path: Path) -> list[Request]:
    """Return a trace file in the public format; what an answer adds is not in it."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    return [
        Request(
            line["timestamp"] / 1000,
            line["input_length"],
            line["output_length"],
            tuple(line["hash_ids"][: line["input_length"] // BLOCK_TOKENS]),
            (),
        )
        for line in lines
    ]


def generate(seed: int, num_requests: int = NUM_REQUESTS) -> list[Request]:
    """Return the requests of one hour (less when fewer are asked for) in the order of their arrival."""
    return list(_requests(random.Random(seed), num_requests))


def _requests(rng: random.Random, num_requests: int) -> Iterator[Request]:
    names = count(1)
    tools = [_first_block(names, _length(rng, 3_500, 0.5)) for _ in range(_NUM_TOOLS)]
    weights = [1 / (rank + 1) ** 1.2 for rank in range(_NUM_TOOLS)]
    waiting: list[tuple[float, int, _Conversation]] = []
    for number in range(num_requests):
        now = number * HOUR_SECONDS / NUM_REQUESTS
        if rng.random() < _TOOL_RATIO:
            prefix = rng.choices(tools, weights)[0]
            yield _grow(now, names, prefix, len(prefix) * BLOCK_TOKENS + _length(rng, 2_000, 1.0), rng)
            continue
        if waiting and waiting[0][0] <= now:
            conversation = heapq.heappop(waiting)[2]
        else:
            conversation = _Conversation(0, (0,), round(rng.expovariate(1 / (_MEAN_TURNS - 1))))
        request = _grow(now, names, conversation.blocks, conversation.tokens + _question(rng, conversation), rng)
        yield request
        if conversation.turns_left:
            tokens = request.input_tokens + request.output_tokens
            later = _Conversation(tokens, request.stored, conversation.turns_left - 1)
            heapq.heappush(waiting, (now + rng.expovariate(1 / _MEAN_PAUSE_SECONDS), number, later))


def _first_block(names: Iterator[int], tokens: int) -> tuple[int, ...]:
    return (0, *(next(names) for _ in range(max(0, tokens // BLOCK_TOKENS - 1))))


def _question(rng: random.Random, conversation: _Conversation) -> int:
    return _length(rng, 3_500, 1.15) if not conversation.tokens else _length(rng, 800, 1.0)


def _length(rng: random.Random, median: float, spread: float) -> int:
    return min(MAX_INPUT_TOKENS, round(median * rng.lognormvariate(0, spread)))


def _grow(now: float, names: Iterator[int], prefix: tuple[int, ...], tokens: int, rng: random.Random) -> Request:
    tokens = min(max(tokens, BLOCK_TOKENS), MAX_INPUT_TOKENS)
    output = max(1, round(rng.expovariate(1 / _OUTPUT_TOKENS)))
    num_input, num_total = tokens // BLOCK_TOKENS, (tokens + output) // BLOCK_TOKENS
    whole = prefix[:num_total] + tuple(next(names) for _ in range(num_total - len(prefix)))
    return Request(now, tokens, output, whole[:num_input], whole[num_input:])
