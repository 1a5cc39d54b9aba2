"""Engines of unlike tensor-parallel sizes on real vLLM: what one's ranks compute, the other's decode from.

`tests/integration/agent/test_cut_anew.py` has the same without engines, whose ranks each take as long to start as another.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.pair import CHUNK_TOKENS, Pair, counts, outcome, random_prompt, running_pair
from tests.support.waiting import wait_until
from tools.demo.client import get_json, prefilled_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(1500)]  # two starts
# Dense and with windows; with states that are cut by head and channel; in both directions.
UNLIKE = [
    ("llama", 2, 1),
    ("llama", 1, 2),
    ("gemma3", 2, 1),
    ("gemma3", 1, 2),
    ("granite4h", 2, 1),
    ("granite4h", 1, 2),
]


@pytest.fixture(scope="module", params=UNLIKE, ids=lambda its: f"{its[0]}, {its[1]} to {its[2]}")
def unlike(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    family, *ranks = request.param
    with running_pair(family, tmp_path_factory.mktemp("ranks"), ranks=(ranks[0], ranks[1])) as running:
        yield running


def test_tokens_equal_those_of_one_engine(unlike: Pair) -> None:
    for length in (CHUNK_TOKENS + 1, 4 * CHUNK_TOKENS + 1, 700):
        prompt = random_prompt(length, seed=length)
        before = counts(unlike.decode).get(outcome("receive", "completed"), 0)
        computed = prefilled_tokens(unlike.decode.url)
        assert unlike.through_both(prompt) == unlike.alone(prompt), length
        assert counts(unlike.decode)[outcome("receive", "completed")] == before + 1
        assert prefilled_tokens(unlike.decode.url) == computed + 1 + length


def test_only_what_the_reader_lacks_travels(unlike: Pair) -> None:
    first = random_prompt(2 * CHUNK_TOKENS + 1, seed=41)
    unlike.through_both(first)
    prompt = first[:-1] + random_prompt(CHUNK_TOKENS + 1, seed=42)
    assert _claimed_first(unlike, prompt) == unlike.alone(prompt)
    wait_until(lambda: unlike.last_sent()["outcome"] == "completed")
    assert unlike.last_sent()["held_bytes"] > 0


def _claimed_first(pair: Pair, prompt: list[int]) -> tuple[int, ...]:
    """Through both, opened once the reader has claimed it: what it holds in its own layout is told to nobody before."""
    wait_until(lambda: not _num_arriving(pair), what="the end of the transfer before")
    grant = pair.grant(prompt)
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(pair.decode_leg, prompt, grant)
        wait_until(lambda: _num_arriving(pair), what="the claim")
        pair.prefill_leg(prompt, grant)
        return decoding.result()


def _num_arriving(pair: Pair) -> int:
    """Transfers that the decode engine's agent waits for, or has for it."""
    return int(get_json(f"{pair.west.status_url}/status")["receiving"])
