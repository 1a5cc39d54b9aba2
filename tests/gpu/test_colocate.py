"""The executor on an NVIDIA GPU. Without one every test here is skipped."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.colocate.lockstep_batching import Lockstep
from prfaas.colocate.device import devices
from prfaas.colocate.device.streams import streams_of
from prfaas.colocate.model.attention import in_place
from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.processes.messages import NO_STOP_TOKEN, Request
from prfaas.colocate.processes.supervisor import ExecutorSettings, Supervisor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CACHE = CacheShape(num_blocks=400, block_tokens=16, num_state_slots=33)
SETTINGS = ExecutorSettings(
    shape="tiny", cache=CACHE, max_rows=16, max_tokens=512, seed=3, device="cuda", dtype="float64"
)
REQUESTS = [(tuple((5 * i + 11 * j) % 320 for j in range(5 + 37 * i % 190)), 1 + 7 * i % 40) for i in range(50)]


def lockstep_answers() -> list[list[int]]:
    shared = devices.allocate("tiny", CACHE, dtype="float64", device="cuda", seed=3)
    tensors = (shared[0].tensor, shared[1].tensor, shared[2].tensor)
    model = devices.model_on("tiny", CACHE, tensors, max_tokens=512)
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


@pytest.mark.parametrize(("num_sequences", "max_queries"), [(5, 1), (1, 300)])
def test_attention_in_place_equals_attention_over_gathered_blocks(num_sequences: int, max_queries: int) -> None:
    torch.manual_seed(7)
    keys, values = (torch.randn(9, 256, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    tables = torch.randperm(8, device="cuda")[: 3 if num_sequences == 1 else 1].expand(num_sequences, -1) + 1
    lengths = torch.full((num_sequences,), tables.shape[1] * 256 - 17, device="cuda")
    q = torch.randn(num_sequences * max_queries, 4, 64, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(num_sequences + 1, device="cuda", dtype=torch.int32) * max_queries
    out = in_place(q, keys, values, starts=starts, max_queries=max_queries, lengths=lengths, tables=tables)
    k, v = (part[tables[0]].flatten(0, 1)[: lengths[0]].transpose(0, 1)[None] for part in (keys, values))
    for i in range(num_sequences):
        mine = q[i * max_queries : (i + 1) * max_queries].transpose(0, 1)[None]
        mask = causal_lower_right(max_queries, int(lengths[0]))
        wanted = scaled_dot_product_attention(mine, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(out[i * max_queries : (i + 1) * max_queries], wanted, atol=2e-2, rtol=2e-2)
