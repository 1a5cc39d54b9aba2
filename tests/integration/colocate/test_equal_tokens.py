"""A colocated instance gives the greedy tokens of plain vLLM."""

from __future__ import annotations

import pytest

from tests.integration.colocate.conftest import MakeInstance
from tests.integration.colocate.instance import mixed_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
FLAGS: dict[str, tuple[str, ...]] = {
    "smollm2": ("--dtype", "float32"),  # In 16 bits, near-ties depend on the batch.
    "granite4h": ("--no-enable-prefix-caching",),
}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", ["smollm2", "gemma3", "granite4h"])
def test_five_hundred_mixed_prompts_give_the_tokens_of_plain_vllm(make_instance: MakeInstance, family: str) -> None:
    prompts = mixed_prompts(500, seed=500)
    colocated = make_instance(family, flags=FLAGS.get(family, ()))
    answers = colocated.ask_all(prompts)
    assert colocated.metric("vllm:external_prefix_cache_hits_total") > 0, "no prompt went to the prefill worker"
    plain = make_instance(family, is_plain=True, flags=FLAGS.get(family, ()))
    expected = plain.ask_all(prompts)
    assert [index for index, pair in enumerate(zip(answers, expected, strict=True)) if pair[0] != pair[1]] == []
