"""A colocated instance gives the greedy tokens of plain vLLM."""

import pytest

from tests.integration.colocate.conftest import MakeInstance
from tests.integration.colocate.instance import Instance, mixed_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
FLAGS: dict[str, tuple[str, ...]] = {
    # In 16 bits, near-ties depend on the batch.
    "smollm2": ("--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 29)),
    "granite4h": ("--no-enable-prefix-caching",),
}


@pytest.fixture(scope="module")
def pair(make_instance: MakeInstance, request: pytest.FixtureRequest) -> tuple[Instance, Instance]:
    """A colocated instance and a plain engine of one family."""
    flags = FLAGS.get(request.param, ())
    return make_instance(request.param, flags=flags), make_instance(request.param, is_plain=True, flags=flags)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pair", ["smollm2", "gemma3", "granite4h"], indirect=True)
@pytest.mark.parametrize("seed", range(5))
def test_five_hundred_mixed_prompts_give_the_tokens_of_plain_vllm(pair: tuple[Instance, Instance], seed: int) -> None:
    colocated, plain = pair
    prompts = mixed_prompts(100, seed=seed)
    answers, expected = colocated.ask_all(prompts), plain.ask_all(prompts)
    assert colocated.metric("vllm:external_prefix_cache_hits_total") > 0, "no prompt went to the prefill worker"
    assert [index for index, both in enumerate(zip(answers, expected, strict=True)) if both[0] != both[1]] == []
