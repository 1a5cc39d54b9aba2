"""A prompt prefilled on one real vLLM engine and decoded on another gives the tokens of one engine alone.

Prompts are whole chunks and one token. One engine alone then splits them as the two do, so tokens are equal even if a
kernel rounds differently in prefill and decode. Families in float32 are compared at odd lengths as well.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from prfaas.kv.group import resume_step_tokens
from tests.support.engine_deployment import CHUNK_TOKENS, random_prompt
from tests.support.engine_pair import EXACT, REPRESENTATIVE, EnginePair, counts, num_outcomes
from tests.support.pool_corruptor import PoolCorruptor
from tests.support.waiting import wait_until
from tools.demo.client import Answer, prefilled_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
WHOLE = CHUNK_TOKENS + 1
CHUNKED = 4 * CHUNK_TOKENS + 1
CONTROL_PROMPTS = 8  # A short convolution forgets missing data after two tokens, so not every prompt shows it.
MAX_DIFFERENCE_NATS = 5e-3
LARGEST = "largest log-probability difference"
MIN_DISTINCT = 6  # With fewer distinct tokens out of 24, different computations might agree by chance.
EXACT_PARAMS = [
    family if family in REPRESENTATIVE else pytest.param(family, marks=pytest.mark.soak) for family in EXACT
]

Record = Callable[[str, object], None]  # The summary shows the largest value of each name.


@pytest.mark.parametrize("length", [WHOLE, CHUNKED], ids=["whole", "chunked"])
def test_tokens_equal_those_of_one_engine(pair: EnginePair, length: int, record_property: Record) -> None:
    prompt = random_prompt(length, seed=length)
    before = num_outcomes(pair.decode, "receive", "completed")
    expected = pair.answer_alone(prompt)
    assert len(set(expected.token_ids)) >= MIN_DISTINCT
    answer = pair.answer_through_both(prompt)
    assert answer.token_ids == expected.token_ids
    assert num_outcomes(pair.decode, "receive", "completed") == before + 1
    record_property(f"{LARGEST} at equal splits, {pair.family}", _largest_difference(answer, expected))


@pytest.mark.parametrize("pair", EXACT_PARAMS, indirect=True)
def test_tokens_are_equal_at_odd_lengths_in_float32(pair: EnginePair, record_property: Record) -> None:
    for length in (2, 37, 150, 700):
        prompt = random_prompt(length, seed=length)
        answer, expected = pair.answer_through_both(prompt), pair.answer_alone(prompt)
        assert answer.token_ids == expected.token_ids, length
        record_property(f"{LARGEST} at odd lengths, {pair.family}", _largest_difference(answer, expected))


def _largest_difference(answer: Answer, expected: Answer) -> float:
    pairs = zip(answer.log_probabilities, expected.log_probabilities, strict=True)
    differences = [abs(value - expected_value) for value, expected_value in pairs]
    assert len(differences) == len(expected.token_ids) and max(differences) < MAX_DIFFERENCE_NATS
    return max(differences)


def test_concurrent_requests_do_not_mix(pair: EnginePair) -> None:
    prompts = [random_prompt(CHUNKED, seed=seed) for seed in (1, 2, 3)]
    expected = [pair.alone(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(pair.through_both, prompts))
    if pair.family in EXACT:
        for prompt, tokens, alone in zip(prompts, answers, expected, strict=True):
            assert tokens == alone or pair.differ_by_near_tie(prompt, tokens, alone), (tokens, alone)
    else:
        # A larger batch rounds differently. The first tokens show that no request got the KV of another.
        assert [tokens[0] for tokens in answers] == [tokens[0] for tokens in expected]


def test_attention_leaves_before_the_last_chunk_is_computed(pair: EnginePair) -> None:
    """A tiny prefill takes milliseconds, in which a busy machine may not run the agents. One of twenty attempts counts."""
    assert any(_leaves_early(pair, seed) for seed in range(11, 31))


def _leaves_early(pair: EnginePair, seed: int) -> bool:
    pair.through_both(random_prompt(CHUNKED, seed=seed))
    wait_until(lambda: pair.last_sent()["outcome"] == "completed")
    sent = pair.last_sent()
    early = sent["acknowledged_before_prefill_ended_bytes"]
    if pair.family in ("gemma3", "gemma4"):
        # Most of its bytes are windows of the last chunk.
        return bool(early > 0)
    return bool(2 * early >= sent["attention_bytes"])


def test_every_state_leaves_when_its_layer_ends(pair: EnginePair) -> None:
    """States left for the end of the pass would be counted. Some further families run a compiled graph."""
    for seed in (32, 33):  # The counts of the first request are known after the second.
        pair.through_both(random_prompt(CHUNKED, seed=seed))
    assert counts(pair.prefill)["prfaas_connector_state_tail_bytes_total"] == 0


def test_the_wire_carries_little_beside_the_missing_blocks(pair: EnginePair) -> None:
    """Windows and states do not grow with the prompt. Framing takes at most 0.5 %."""
    for length in (CHUNKED, 2 * CHUNKED - 1):
        pair.through_both(random_prompt(length, seed=length + 17))
        wait_until(lambda: pair.last_sent()["outcome"] == "completed")
        sent = pair.last_sent()
        assert sent["payload_bytes"] == _needed_bytes(pair, length - 1)
        assert sent["payload_bytes"] <= sent["wire_bytes"] <= 1.005 * sent["payload_bytes"]


def _needed_bytes(pair: EnginePair, num_tokens: int) -> int:
    needed, groups = 0, pair.layout().groups
    for group in groups:
        first = group.first_kept_block(num_tokens, resume_step_tokens(groups))
        num_blocks = 1 if group.is_state else -(-num_tokens // group.block_tokens) - first
        needed += group.block_bytes * num_blocks
    return needed


def test_a_zeroed_layer_changes_the_tokens(pair: EnginePair) -> None:
    """Negative control: one layer of a prompt in the west's pool is zeroed before the engine loads it."""
    with PoolCorruptor(pair) as corruptor:
        assert not _changes_tokens(corruptor, None, seed=21)
        for group in range(len(pair.layout().groups)):
            seeds = (100 * group + number for number in range(22, 22 + CONTROL_PROMPTS))
            assert any(_changes_tokens(corruptor, group, seed=seed) for seed in seeds), f"group {group}"


def _changes_tokens(corruptor: PoolCorruptor, group: int | None, *, seed: int) -> bool:
    prompt = random_prompt(CHUNKED, seed=seed)
    slots = corruptor.slots_of(prompt)
    if group is not None:
        corruptor.zero_first_layer(group, slots[group])
    return corruptor.pair.through_both(prompt) != corruptor.pair.alone(prompt)


def test_requests_with_a_common_prefix_compute_it_once(pair: EnginePair) -> None:
    """The rest comes from the engine's own cache or from the node's pool."""
    first = random_prompt(2 * CHUNK_TOKENS + 1, seed=41)
    prompt = first[:-1] + random_prompt(CHUNK_TOKENS + 1, seed=42)
    pair.through_both(first)
    before = prefilled_tokens(pair.prefill.url)
    assert pair.through_both(prompt) == pair.alone(prompt)
    assert prefilled_tokens(pair.prefill.url) - before == CHUNK_TOKENS


@pytest.mark.parametrize("pair", ["qwen3_next"], indirect=True)
def test_only_blocks_missing_in_both_prefix_caches_are_computed_and_loaded(pair: EnginePair) -> None:
    """Both engines hold the first two blocks from an earlier request."""
    first = random_prompt(2 * CHUNK_TOKENS + 1, seed=31)
    prompt = first[:-1] + random_prompt(CHUNK_TOKENS + 1, seed=32)
    pair.through_both(first)
    before = counts(pair.decode)['prfaas_connector_copied_bytes_total{direction="receive"}']
    assert pair.through_both(prompt) == pair.alone(prompt)
    loaded = counts(pair.decode)['prfaas_connector_copied_bytes_total{direction="receive"}'] - before
    assert loaded == sum(group.block_bytes for group in pair.layout().groups), "one block of 256 tokens, and the states"
