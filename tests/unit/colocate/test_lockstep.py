"""The baseline computes the same tokens; otherwise comparing its speed would mean nothing."""

from __future__ import annotations

import pytest

from benchmarks.colocate.lockstep_batching import Lockstep
from prfaas.colocate.processes.messages import NO_STOP_TOKEN, Request
from tests.support.sequential_generation import generate
from tests.unit.colocate.tiny import CACHE, tiny_model


@pytest.mark.parametrize("chunk_tokens", [16, 50, 512])
def test_chunked_hybrid_batching_gives_the_sequential_tokens(chunk_tokens: int) -> None:
    prompts = [tuple((3 * i + j) % 300 for j in range(20 + 30 * i)) for i in range(5)]
    expected = [generate(tiny_model(), prompt, 12) for prompt in prompts]
    model = tiny_model()
    model.cache.kv[:, :, 0], model.cache.states[:, 0] = 0, 0
    lockstep = Lockstep(model, CACHE, chunk_tokens=chunk_tokens, max_rows=4, max_blocks=32)
    for number, prompt in enumerate(prompts):
        lockstep.add(Request(number, 0, 12, NO_STOP_TOKEN, prompt))
    answers: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    for _ in range(200):
        for number, token in lockstep.step():
            answers[number].append(token)
    assert list(answers.values()) == expected
    assert lockstep.is_idle()
