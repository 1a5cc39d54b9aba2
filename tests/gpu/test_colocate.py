"""The executor on an NVIDIA GPU. Without one every test here is skipped."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from prfaas.colocate import device
from prfaas.colocate.cache import CacheShape
from prfaas.colocate.cuda_streams import streams_of
from prfaas.colocate.lockstep import Lockstep
from prfaas.colocate.messages import NO_STOP_TOKEN, Request
from prfaas.colocate.supervisor import ExecutorSettings, Supervisor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CACHE = CacheShape(num_blocks=400, block_tokens=16, num_state_slots=33)
SETTINGS = ExecutorSettings(
    shape="tiny", cache=CACHE, max_rows=16, max_tokens=512, seed=3, device="cuda", dtype="float64"
)
REQUESTS = [(tuple((5 * i + 11 * j) % 320 for j in range(5 + 37 * i % 190)), 1 + 7 * i % 40) for i in range(50)]


def lockstep_answers() -> list[list[int]]:
    shared = device.allocate("tiny", CACHE, dtype="float64", device="cuda", seed=3)
    tensors = (shared[0].tensor, shared[1].tensor, shared[2].tensor)
    model = device.model_on("tiny", CACHE, tensors, max_tokens=512)
    baseline = Lockstep(model, CACHE, chunk_tokens=64, max_rows=16, max_blocks=32)
    answers: list[list[int]] = [[] for _ in REQUESTS]
    for number, (prompt, max_tokens) in enumerate(REQUESTS):
        baseline.add(Request(number, 0, max_tokens, NO_STOP_TOKEN, prompt))
    while any(len(answer) < wanted for answer, (_, wanted) in zip(answers, REQUESTS, strict=True)):
        for number, token in baseline.step():
            answers[number].append(token)
    return answers


async def executor_answers(settings: ExecutorSettings) -> list[list[int]]:
    async with Supervisor(settings) as executor:

        async def answer(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
            return [token async for token in executor.generate(prompt, max_tokens)]

        return await asyncio.gather(*(answer(*request) for request in REQUESTS))


@pytest.mark.parametrize("partition", ["none", "green_contexts"])
async def test_two_processes_on_a_gpu_give_the_tokens_of_one(partition: str) -> None:
    settings = dataclasses.replace(SETTINGS, partition=partition)
    assert await executor_answers(settings) == lockstep_answers()


def test_both_sides_of_a_split_compute_right() -> None:
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.float64) for _ in range(2))
    expected = a @ b
    torch.cuda.synchronize()
    for side, share in (("decode", 0.4), ("prefill", 0.6)):
        stream = streams_of("green_contexts", "decode" if side == "decode" else "prefill").of(share)
        with torch.cuda.stream(stream):
            product = a @ b
        stream.synchronize()
        torch.testing.assert_close(product, expected)
