"""A prompt that leaves an earlier one in the middle begins at its last checkpoint before, which the node's pool holds."""

from __future__ import annotations

import pytest

from tests.e2e.pair import Pair, counts, outcome, random_prompt
from tests.support.waiting import wait_until
from tools.demo.client import prefilled_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PROMPT_TOKENS = 1500


@pytest.mark.parametrize(
    ("pair", "shared", "checkpoint"),
    [
        # Three groups of states beside one of attention, in blocks of 256. vLLM itself holds 1,024 tokens of attention, and
        # no state of the branch.
        ("qwen3_next", 1100, 768),
        # Five groups of windows of 256 tokens beside one of full attention, in blocks of 128.
        ("gemma3", 1350, 1280),
    ],
    indirect=["pair"],
)
def test_only_what_comes_after_the_checkpoint_is_computed(pair: Pair, shared: int, checkpoint: int) -> None:
    first = random_prompt(PROMPT_TOKENS, seed=91)
    branch = first[:shared] + random_prompt(100, seed=92)
    stored = _count(pair, "store")
    pair.locally(first)
    wait_until(lambda: _count(pair, "store") > stored, what="the first prompt in the pool")
    assert _count(pair, "checkpoint") > 0
    wanted, before = pair.alone(branch), prefilled_tokens(pair.decode.url)
    reused = _count(pair, "reuse")
    assert pair.locally(branch) == wanted
    assert prefilled_tokens(pair.decode.url) - before == len(branch) - checkpoint
    assert _count(pair, "reuse") == reused + 1


def _count(pair: Pair, direction: str) -> float:
    return counts(pair.decode).get(outcome(direction, "completed"), 0)
