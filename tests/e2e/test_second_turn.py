"""Turn 2 of a conversation, on the same node, on another decode node, and through both: only its new tokens are computed.

Turn 1 is prefilled in the east and decoded in the west. What one engine alone answers is asked under a salt of its own,
turn by turn: it splits the prompts as those do that take up what is held, so that equality is exact in bfloat16 too.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import pytest

from prfaas.hashing import HashChain, root_hash
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import prefix_message
from prfaas.types import Prefix
from tests.e2e.pair import CHUNK_TOKENS, EXACT, Pair, held_bytes, random_prompt, resumes_at
from tests.e2e.vandal import Vandal
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.demo.client import prefilled_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Turn:
    """Turn 1, question and answer. Its first `held` tokens lie in the west's pool, and under `salt` once more."""

    tokens: list[int]
    held: int
    salt: str


@pytest.fixture(scope="module")
def turn(pair: Pair) -> Turn:
    # One engine alone splits whole chunks and one token as the two do. Elsewhere the answer shall end a block.
    question = random_prompt(2 * CHUNK_TOKENS + (-7 if pair.family in EXACT else 1), seed=51)
    its = Turn(question, 0, os.urandom(8).hex())
    tokens = [*question, *pair.through_both(question)]
    assert [*question, *_alone(pair, its, question)] == tokens
    held = resumes_at(pair.layout(), len(tokens) - 1)  # the answer's last token was never computed
    assert held > len(question)
    with Vandal(pair) as vandal:
        for tenant in ("", its.salt):
            chain = HashChain(root_hash(pair.family, tenant.encode()), tokens)
            wait_until(lambda chain=chain: held in vandal.held_lengths(chain), what="the answer in the west's pool")  # type: ignore[misc]
    return Turn(tokens, held, its.salt)


def _alone(pair: Pair, turn: Turn, prompt: list[int]) -> tuple[int, ...]:
    """What the decode engine answers to whom nobody else's KV is shown."""
    return pair.at(pair.decode, prompt, cache_salt=turn.salt)


def test_on_the_same_node(pair: Pair, turn: Turn) -> None:
    prompt = turn.tokens + random_prompt(100, seed=52)
    before = prefilled_tokens(pair.decode.url)
    answer = pair.at(pair.decode, prompt)
    _assert_computed(pair.decode.url, before + len(prompt) - turn.held)
    assert answer == _alone(pair, turn, prompt)


def _assert_computed(url: str, num_tokens: int) -> None:
    wait_until(lambda: prefilled_tokens(url) >= num_tokens, what=f"{num_tokens} computed tokens")
    assert prefilled_tokens(url) == num_tokens


@pytest.fixture(scope="module")
def copied(pair: Pair, turn: Turn) -> pb.CopyResponse:
    """The manager has had turn 1 copied from west to east, which has prefilled its question."""
    chain = HashChain(root_hash(pair.family), turn.tokens[: turn.held])
    prefix = Prefix(pair.family, b"".join(chain.units), turn.held, chain.at(turn.held))
    order = pb.CopyRequest(prefix=prefix_message(prefix), source=pair.west.name, destination=pair.east.name)
    order.timeout_seconds = PATIENCE_SECONDS
    return asyncio.run(_copy(pair, order))


async def _copy(pair: Pair, order: pb.CopyRequest) -> pb.CopyResponse:
    client = ManagerClient([pair.manager], name="router", secret=(pair.east.socket.parent / "secret").read_bytes())
    try:
        return await client.copy(order, timeout_seconds=2 * PATIENCE_SECONDS)
    finally:
        await client.close()


def test_on_another_decode_node(pair: Pair, turn: Turn, copied: pb.CopyResponse) -> None:
    assert copied.outcome == "completed" and copied.moved_bytes > 0
    prompt = turn.tokens + random_prompt(100, seed=53)
    before = prefilled_tokens(pair.prefill.url)
    answer = pair.at(pair.prefill, prompt)
    _assert_computed(pair.prefill.url, before + len(prompt) - turn.held)
    assert answer == _alone(pair, turn, prompt)


def test_through_both(pair: Pair, turn: Turn, copied: pb.CopyResponse) -> None:
    assert copied.outcome == "completed"
    prompt = turn.tokens + random_prompt(4 * CHUNK_TOKENS + 1 - len(turn.tokens), seed=54)  # whole chunks and one token
    before = [prefilled_tokens(its.url) for its in (pair.prefill, pair.decode)]
    answer = pair.through_both(prompt)
    _assert_computed(pair.prefill.url, before[0] + len(prompt) - 1 - turn.held)
    _assert_computed(pair.decode.url, before[1] + 1)
    wait_until(lambda: pair.last_sent()["outcome"] == "completed")
    sent = pair.last_sent()
    assert sent["held_bytes"] == held_bytes(pair.layout(), turn.held, len(prompt) - 1), "full blocks of turn 1 stay"
    missing = sent["payload_bytes"] - sent["held_bytes"]
    assert missing <= sent["wire_bytes"] <= missing * 1.01 + 1000
    assert answer == _alone(pair, turn, prompt)
