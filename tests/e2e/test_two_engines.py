"""A prompt prefilled on one real vLLM and decoded on another gives the tokens of one engine alone, for each kind of KV.

Prompts are whole chunks and one token: one engine alone then splits them as the two do, so that "equal" is exact even
where a kernel rounds differently in prefill and decode. The families in float32 are compared at odd lengths as well.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.pair import CHUNK_TOKENS, EXACT, Pair, counts, outcome, random_prompt
from tests.e2e.vandal import Vandal
from tests.support.waiting import wait_until
from tools.demo.client import Answer, prefilled_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
WHOLE = CHUNK_TOKENS + 1
CHUNKED = 4 * CHUNK_TOKENS + 1
CONTROL_PROMPTS = 8  # a short convolution forgets what it lacks after two tokens: not every prompt shows it
NEAR_TIE_NATS = 1e-3  # by being in a batch a float32 log-probability moved by 6e-5 at most (72 answers of 8 families)
MAX_DIFFERENCE_NATS = 5e-3
LARGEST = "largest log-probability difference"
MIN_DISTINCT = 6  # of 24 output tokens: fewer, and two different computations might agree by chance


Record = Callable[[str, object], None]  # pytest's `record_property`; the run's summary shows the largest of each name


@pytest.mark.parametrize("length", [WHOLE, CHUNKED], ids=["whole", "chunked"])
def test_tokens_equal_those_of_one_engine(pair: Pair, length: int, record_property: Record) -> None:
    prompt = random_prompt(length, seed=length)
    before = counts(pair.decode).get(outcome("receive", "completed"), 0)
    wanted = pair.answer_alone(prompt)
    assert len(set(wanted.token_ids)) >= MIN_DISTINCT
    got = pair.answer_through_both(prompt)
    assert got.token_ids == wanted.token_ids
    assert counts(pair.decode)[outcome("receive", "completed")] == before + 1
    record_property(f"{LARGEST} at equal splits, {pair.family}", _largest_difference(got, wanted))


@pytest.mark.parametrize("pair", EXACT, indirect=True)
def test_tokens_are_equal_at_odd_lengths_in_exact_arithmetic(pair: Pair, record_property: Record) -> None:
    for length in (2, 37, 150, 700):
        prompt = random_prompt(length, seed=length)
        got, wanted = pair.answer_through_both(prompt), pair.answer_alone(prompt)
        assert got.token_ids == wanted.token_ids, length
        record_property(f"{LARGEST} at odd lengths, {pair.family}", _largest_difference(got, wanted))


def _largest_difference(got: Answer, wanted: Answer) -> float:
    """In nats, over the tokens of one answer."""
    pairs = zip(got.log_probabilities, wanted.log_probabilities, strict=True)
    differences = [abs(its - alone) for its, alone in pairs]
    assert len(differences) == len(wanted.token_ids) and max(differences) < MAX_DIFFERENCE_NATS
    return max(differences)


def test_several_requests_at_once_do_not_mix(pair: Pair) -> None:
    prompts = [random_prompt(CHUNKED, seed=seed) for seed in (1, 2, 3)]
    wanted = [pair.alone(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(pair.through_both, prompts))
    if pair.family in EXACT:
        for prompt, its, alone in zip(prompts, got, wanted, strict=True):
            assert its == alone or _differ_by_a_near_tie(pair, prompt, its, alone), (its, alone)
    else:  # a batch of several rounds differently: the first tokens show that nobody got another's KV
        assert [tokens[0] for tokens in got] == [tokens[0] for tokens in wanted]


def _differ_by_a_near_tie(pair: Pair, prompt: list[int], got: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether the engine alone is as good as undecided where two answers part."""
    same = next(at for at, (its, alone) in enumerate(zip(got, wanted, strict=True)) if its != alone)
    return pair.lead_nats([*prompt, *wanted[:same]]) < NEAR_TIE_NATS


def test_attention_leaves_before_the_last_chunk_is_computed(pair: Pair) -> None:
    """A tiny prefill ends within milliseconds, in which a busy machine may not run the agents at all: one of twenty counts."""
    assert any(_leaves_early(pair, seed) for seed in range(11, 31))


def _leaves_early(pair: Pair, seed: int) -> bool:
    pair.through_both(random_prompt(CHUNKED, seed=seed))
    wait_until(lambda: pair.last_sent()["outcome"] == "completed")
    sent = pair.last_sent()
    early = sent["acknowledged_before_prefill_ended_bytes"]
    if pair.family == "gemma3":  # most of what it sends lies in its last chunks' windows
        return bool(early > 0)
    return bool(2 * early >= sent["attention_bytes"])


def test_every_state_leaves_as_its_layer_ends(pair: Pair) -> None:
    """In a compiled graph too (`COMPILED`): none is left for the pass's end, which would be counted."""
    for seed in (32, 33):  # what the first one counts is known at the latest when the second one has run
        pair.through_both(random_prompt(CHUNKED, seed=seed))
    assert counts(pair.prefill)["prfaas_connector_state_tail_bytes_total"] == 0


def test_the_wire_carries_the_missing_blocks_and_little_else(pair: Pair) -> None:
    """Windows and states are as large for a prompt of twice the length; framing is at most 0.5 %."""
    for length in (CHUNKED, 2 * CHUNKED - 1):
        pair.through_both(random_prompt(length, seed=length + 17))
        wait_until(lambda: pair.last_sent()["outcome"] == "completed")
        sent = pair.last_sent()
        assert sent["payload_bytes"] == _needed_bytes(pair, length - 1)
        assert sent["payload_bytes"] <= sent["wire_bytes"] <= 1.005 * sent["payload_bytes"]


def _needed_bytes(pair: Pair, num_tokens: int) -> int:
    """What resuming after whole blocks of `num_tokens` tokens needs."""
    needed = 0
    for group in pair.layout().groups:
        first = 0
        if group.window_tokens is not None:
            first = (num_tokens - group.window_tokens + 1) // group.block_tokens
        states = group.is_state
        needed += group.block_bytes * (1 if states else -(-num_tokens // group.block_tokens) - first)
    return needed


def test_a_zeroed_layer_changes_the_tokens(pair: Pair) -> None:
    """Negative control: one layer of what the west's agent holds of a prompt is zeroed before the engine loads it."""
    with Vandal(pair) as vandal:
        assert not _changes_tokens(vandal, None, seed=21)
        for group in range(len(pair.layout().groups)):
            seeds = (100 * group + its for its in range(22, 22 + CONTROL_PROMPTS))
            assert any(_changes_tokens(vandal, group, seed=seed) for seed in seeds), f"group {group}"


def _changes_tokens(vandal: Vandal, group: int | None, *, seed: int) -> bool:
    """Whether a prompt's answer is another once a layer of `group` is zeroed."""
    prompt = random_prompt(CHUNKED, seed=seed)
    slots = vandal.slots_of(prompt)
    if group is not None:
        vandal.zero_first_layer(group, slots[group])
    return vandal.pair.through_both(prompt) != vandal.pair.alone(prompt)


def test_requests_that_share_a_prefix_share_its_computation(pair: Pair) -> None:
    """Only the new part of the second prompt is computed, whether the engine's own cache or the node's pool has the rest."""
    first = random_prompt(2 * CHUNK_TOKENS + 1, seed=41)
    prompt = first[:-1] + random_prompt(CHUNK_TOKENS + 1, seed=42)
    pair.through_both(first)
    before = prefilled_tokens(pair.prefill.url)
    assert pair.through_both(prompt) == pair.alone(prompt)
    assert prefilled_tokens(pair.prefill.url) - before == CHUNK_TOKENS


@pytest.mark.parametrize("pair", ["qwen3_next"], indirect=True)
def test_only_what_neither_prefix_cache_holds_is_computed_and_loaded(pair: Pair) -> None:
    """Both engines have the first two blocks of the prompt from an earlier request: the rest travels, tokens are equal."""
    first = random_prompt(2 * CHUNK_TOKENS + 1, seed=31)
    prompt = first[:-1] + random_prompt(CHUNK_TOKENS + 1, seed=32)
    pair.through_both(first)
    before = counts(pair.decode)['prfaas_connector_copied_bytes_total{direction="receive"}']
    assert pair.through_both(prompt) == pair.alone(prompt)
    loaded = counts(pair.decode)['prfaas_connector_copied_bytes_total{direction="receive"}'] - before
    block, states = (
        sum(group.block_bytes for group in pair.layout().groups if linear == (group.is_state))
        for linear in (False, True)
    )
    assert loaded == block + states  # one block of 256 tokens
