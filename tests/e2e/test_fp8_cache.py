"""Engines that keep their KV in fp8, with few blocks and preemptions, give the tokens of one engine."""

from collections.abc import Iterator

import pytest

from tests.support.engine_deployment import random_prompt
from tests.support.engine_pair import EnginePair, num_outcomes, running_pair

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(900)]
BLOCK_TOKENS, NUM_BLOCKS = 32, 24  # vLLM keeps one block.
FLAGS = ("--kv-cache-dtype", "fp8", "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(NUM_BLOCKS))
MAX_LEN = ("--max-model-len", str((NUM_BLOCKS - 2) * BLOCK_TOKENS))
MIN_DISTINCT = 6  # With fewer distinct tokens out of 24, different computations might agree by chance.


@pytest.fixture(scope="module")
def fp8_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    directory = tmp_path_factory.mktemp("fp8")
    with running_pair("llama", directory, extra=(*FLAGS, *MAX_LEN), connector={"reuse": False}) as running:
        yield running


@pytest.mark.parametrize("length", [257, 513, 600])
def test_kv_in_fp8_gives_the_tokens_of_one_engine(fp8_pair: EnginePair, length: int) -> None:
    assert "kv_cache_dtype=fp8" in fp8_pair.layout().packing
    prompt = random_prompt(length, seed=length)
    before = num_outcomes(fp8_pair.decode, "receive", "completed")
    expected = fp8_pair.alone(prompt)
    assert fp8_pair.through_both(prompt) == expected and len(set(expected)) >= MIN_DISTINCT
    assert num_outcomes(fp8_pair.decode, "receive", "completed") == before + 1
