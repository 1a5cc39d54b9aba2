"""Transfers between real vLLM engines of several tensor-parallel ranks, mostly of different sizes.

Integration tests of the agent check repacking without engines.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prfaas.kv.parts import piece_of
from tests.support.engine_deployment import CHUNK_TOKENS, random_prompt
from tests.support.engine_pair import EnginePair, counts, outcome, running_pair
from tests.support.waiting import wait_until
from tools.demo.client import get_json, prefilled_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(1500)]
# Dense and with windows; with states that are cut by head and channel; in both directions.
UNLIKE = [
    ("llama", 2, 1),
    ("llama", 1, 2),
    ("gemma3", 2, 1),
    ("gemma3", 1, 2),
    ("granite4h", 2, 1),
    ("granite4h", 1, 2),
    # Each of two ranks stores and sends a piece of the attention's blocks.
    ("granite4h_one_head", 2, 1),
    ("granite4h_one_head", 1, 2),
    ("granite4h_one_head", 2, 2),
]
# Fewer states would take shorter blocks, and kernels of a CPU pack a block as a whole.
EXTRA = {"granite4h_one_head": ("--block-size", "256")}


@pytest.fixture(scope="module", params=UNLIKE, ids=lambda case: f"{case[0]}, {case[1]} to {case[2]}")
def unlike(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    family, *ranks = request.param
    extra = EXTRA.get(family, ())
    with running_pair(family, tmp_path_factory.mktemp("ranks"), ranks=(ranks[0], ranks[1]), extra=extra) as running:
        yield running


def test_tokens_equal_those_of_one_engine(unlike: EnginePair) -> None:
    for length in (CHUNK_TOKENS + 1, 4 * CHUNK_TOKENS + 1, 700):
        prompt = random_prompt(length, seed=length)
        before = counts(unlike.decode).get(outcome("receive", "completed"), 0)
        computed = prefilled_tokens(unlike.decode.url)
        assert unlike.through_both(prompt) == unlike.alone(prompt), length
        assert counts(unlike.decode)[outcome("receive", "completed")] == before + 1
        assert prefilled_tokens(unlike.decode.url) == computed + 1 + length


def test_ranks_with_equal_attention_divide_its_blocks(unlike: EnginePair) -> None:
    layout = unlike.layout()  # Of the prefill engine.
    layers = [layer for group in layout.groups if not group.is_state for layer in group.layers]
    num_pieces = layout.shard.size if unlike.family == "granite4h_one_head" else 1
    assert layers and all(piece_of(layer)[1] == num_pieces for layer in layers)


def test_only_what_the_reader_lacks_travels(unlike: EnginePair) -> None:
    first = random_prompt(2 * CHUNK_TOKENS + 1, seed=41)
    unlike.through_both(first)
    prompt = first[:-1] + random_prompt(CHUNK_TOKENS + 1, seed=42)
    assert _claimed_first(unlike, prompt) == unlike.alone(prompt)
    wait_until(lambda: unlike.last_sent()["outcome"] == "completed")
    assert unlike.last_sent()["held_bytes"] > 0


def _claimed_first(pair: EnginePair, prompt: list[int]) -> tuple[int, ...]:
    """Send a prompt after the reader has claimed it. Only the claim tells what the reader holds in its own layout."""
    wait_until(lambda: not _num_arriving(pair), what="the end of the transfer before")
    grant = pair.grant(prompt)
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(pair.decode_leg, prompt, grant)
        wait_until(lambda: _num_arriving(pair), what="the claim")
        pair.prefill_leg(prompt, grant)
        return decoding.result()


def _num_arriving(pair: EnginePair) -> int:
    """Return the number of transfers that the decode engine's agent awaits or holds."""
    return int(get_json(f"{pair.west.status_url}/status")["receiving"])
