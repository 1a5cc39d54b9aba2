"""Prompts that begin with KV in a node's pool: later turns of a conversation, and branches of earlier prompts.

Answers of one engine alone are asked turn by turn under a salt of their own. It then splits the prompts like engines that
reuse a prefix, so tokens are equal in bfloat16 too.
"""

import asyncio
import os
from dataclasses import dataclass

import pytest

from prfaas.hashing import HashChain, root_hash
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import prefix_message
from prfaas.types import Prefix
from tests.support.engine_deployment import CHUNK_TOKENS, random_prompt
from tests.support.engine_pair import EXACT, EnginePair, held_bytes, num_outcomes, resumes_at
from tests.support.pool_corruptor import PoolCorruptor
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.demo.client import prefilled_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
BRANCHED_TOKENS = 1500


@dataclass(frozen=True)
class Turn:
    """First turn, question and answer. Its first `held` tokens lie in the west's pool, and again under `salt`."""

    tokens: list[int]
    held: int
    salt: str


@pytest.fixture(scope="module")
def turn(pair: EnginePair) -> Turn:
    """Prefill a first turn in the east and decode it in the west."""
    # One engine alone splits whole chunks and one token like the two. Exact families need an answer that ends a block.
    question = random_prompt(2 * CHUNK_TOKENS + (-7 if pair.family in EXACT else 1), seed=51)
    salt = os.urandom(8).hex()
    tokens = [*question, *pair.through_both(question)]
    assert [*question, *pair.at(pair.decode, question, cache_salt=salt)] == tokens
    held = resumes_at(pair.layout(), len(tokens) - 1)  # The last token of an answer is never computed.
    assert held > len(question)
    with PoolCorruptor(pair) as pool:
        for tenant in ("", salt):
            chain = HashChain(root_hash(pair.family, tenant.encode()), tokens)
            wait_until(lambda chain=chain: held in pool.held_lengths(chain), what="the answer in the west's pool")  # type: ignore[misc]
    return Turn(tokens, held, salt)


def _alone(pair: EnginePair, turn: Turn, prompt: list[int]) -> tuple[int, ...]:
    return pair.at(pair.decode, prompt, cache_salt=turn.salt)


def _assert_computed(url: str, num_tokens: int) -> None:
    wait_until(lambda: prefilled_tokens(url) >= num_tokens, what=f"{num_tokens} computed tokens")
    assert prefilled_tokens(url) == num_tokens


def test_second_turn_on_the_same_node_computes_only_new_tokens(pair: EnginePair, turn: Turn) -> None:
    prompt = turn.tokens + random_prompt(100, seed=52)
    before = prefilled_tokens(pair.decode.url)
    answer = pair.at(pair.decode, prompt)
    _assert_computed(pair.decode.url, before + len(prompt) - turn.held)
    assert answer == _alone(pair, turn, prompt)


@pytest.fixture(scope="module")
def copied(pair: EnginePair, turn: Turn) -> pb.CopyResponse:
    """Have the manager copy the first turn from west to east, which has prefilled its question."""
    chain = HashChain(root_hash(pair.family), turn.tokens[: turn.held])
    prefix = Prefix(pair.family, b"".join(chain.units), turn.held, chain.at(turn.held))
    order = pb.CopyRequest(prefix=prefix_message(prefix), source=pair.west.name, destination=pair.east.name)
    order.timeout_seconds = PATIENCE_SECONDS
    return asyncio.run(_copy(pair, order))


async def _copy(pair: EnginePair, order: pb.CopyRequest) -> pb.CopyResponse:
    client = ManagerClient([pair.manager_address], name="router", secret=pair.secret)
    try:
        return await client.copy(order, timeout_seconds=2 * PATIENCE_SECONDS)
    finally:
        await client.close()


def test_second_turn_on_another_decode_node_computes_only_new_tokens(
    pair: EnginePair, turn: Turn, copied: pb.CopyResponse
) -> None:
    assert copied.outcome == "completed" and copied.moved_bytes > 0
    prompt = turn.tokens + random_prompt(100, seed=53)
    before = prefilled_tokens(pair.prefill.url)
    answer = pair.at(pair.prefill, prompt)
    _assert_computed(pair.prefill.url, before + len(prompt) - turn.held)
    assert answer == _alone(pair, turn, prompt)


def test_second_turn_through_both_transfers_only_what_the_reader_lacks(
    pair: EnginePair, turn: Turn, copied: pb.CopyResponse
) -> None:
    assert copied.outcome == "completed"
    prompt = turn.tokens + random_prompt(4 * CHUNK_TOKENS + 1 - len(turn.tokens), seed=54)
    before = [prefilled_tokens(engine.url) for engine in (pair.prefill, pair.decode)]
    answer = pair.through_both(prompt)
    _assert_computed(pair.prefill.url, before[0] + len(prompt) - 1 - turn.held)
    _assert_computed(pair.decode.url, before[1] + 1)
    wait_until(lambda: pair.last_sent()["outcome"] == "completed")
    sent = pair.last_sent()
    assert sent["held_bytes"] == held_bytes(pair.layout(), turn.held, len(prompt) - 1), "full blocks of the first turn"
    missing = sent["payload_bytes"] - sent["held_bytes"]
    assert missing <= sent["wire_bytes"] <= missing * 1.01 + 1000
    assert answer == _alone(pair, turn, prompt)


@pytest.mark.parametrize(
    ("pair", "shared", "checkpoint"),
    [
        # Three groups of states beside one of attention, in blocks of 256. vLLM itself holds 1,024 tokens of attention, but
        # no state of the branch.
        ("qwen3_next", 1100, 768),
        # Five groups of windows of 256 tokens beside one of full attention, in blocks of 128.
        ("gemma3", 1350, 1280),
    ],
    indirect=["pair"],
)
def test_a_branch_of_an_earlier_prompt_begins_at_the_last_checkpoint(
    pair: EnginePair, shared: int, checkpoint: int
) -> None:
    first = random_prompt(BRANCHED_TOKENS, seed=91)
    branch = first[:shared] + random_prompt(100, seed=92)
    stored = num_outcomes(pair.decode, "store", "completed")
    pair.locally(first)
    wait_until(lambda: num_outcomes(pair.decode, "store", "completed") > stored, what="the first prompt in the pool")
    assert num_outcomes(pair.decode, "checkpoint", "completed") > 0
    expected, before = pair.alone(branch), prefilled_tokens(pair.decode.url)
    reused = num_outcomes(pair.decode, "reuse", "completed")
    assert pair.locally(branch) == expected
    assert prefilled_tokens(pair.decode.url) - before == len(branch) - checkpoint
    assert num_outcomes(pair.decode, "reuse", "completed") == reused + 1


@pytest.mark.soak  # tests/conformance has such blocks without a pair of engines.
@pytest.mark.parametrize("pair", ["gemma4"], indirect=True)
def test_prompts_resume_where_blocks_of_unlike_sizes_end_together(pair: EnginePair) -> None:
    """Windows in blocks of 128 tokens, full attention in blocks of 256. Both resumptions lie far beyond the window."""
    assert sorted({group.block_tokens for group in pair.layout().groups}) == [128, 256]
    first = random_prompt(3000, seed=93)
    turn = [*first, *pair.through_both(first), *random_prompt(100, seed=94)]
    branch = first[:2900] + random_prompt(100, seed=95)
    for prompt in (turn, branch):
        wait_until(pair.has_healed, what="both pools at the manager")
        expected, before = pair.alone(prompt), prefilled_tokens(pair.decode.url)
        assert pair.locally(prompt) == expected
        assert prefilled_tokens(pair.decode.url) - before == len(prompt) - 2816
    assert pair.agent_status("west")["reporting"]["num_orphans"] == 0
