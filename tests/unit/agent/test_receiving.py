"""What a receiving agent makes of opens and claims: each open is answered, and an engine reads the blocks it expects."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterator

import pytest

from prfaas import grants
from prfaas.agent.engines import EngineConnection
from prfaas.agent.plan import OpenBody, make_plan
from prfaas.agent.protocol import PROTOCOL_VERSION, Attach, Message, MessageBuffer, Receive, TransferFailed
from prfaas.agent.receiving import Receiving
from prfaas.agent.transfer_log import TransferLog
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.layout import Layout
from prfaas.cachepool.pool import Pool
from prfaas.grants import Grant
from prfaas.hashing import HashChain, root_hash
from prfaas.transport.inbound import Accepted, OpenRequest, ReceiveCompleted, Rejected, TransferStats
from prfaas.types import AgentName, GroupBlocks, Shard, TransferId
from tests.unit.cachepool.layouts import hybrid

KEY = b"g" * 32
NUM_TOKENS = 96
CHAIN = HashChain(root_hash("hybrid"), range(NUM_TOKENS))
TRANSFER = TransferId(bytes(range(16)))


def _groups(num_blocks: int) -> tuple[GroupBlocks, ...]:
    return (GroupBlocks(0, 0, CHAIN.blocks(32, first_block=0, num_tokens=32 * num_blocks), CHAIN.root),)


GROUPS = _groups(3)


class Node:
    """One receiving agent without a wire, and one engine beside it."""

    def __init__(self) -> None:
        self.pool = Pool(1 << 20)
        self.engine_end, self.agent_end = socket.socketpair()
        attach = Attach(PROTOCOL_VERSION, "w", "scheduler", 0, None)
        self.engine = EngineConnection(attach, None, None, None, self.agent_end)
        self.receiving = Receiving(
            name=AgentName("west"),
            grant_key=KEY,
            pool=self.pool,
            arena_of=self._arena_of,
            transfer_log=TransferLog(),
            open_timeout_seconds=10.0,
        )
        self.is_broken = False
        self.answers: list[Accepted | Rejected] = []
        self.token = grants.sign(
            Grant(
                TRANSFER,
                source=AgentName("east"),
                destination=AgentName("west"),
                destination_address="127.0.0.1:1",
                prompt_hash=CHAIN.at(NUM_TOKENS),
                num_tokens=NUM_TOKENS,
                max_bytes=1 << 20,
                tenant="",
                expires_at=time.time() + 60.0,
            ),
            KEY,
        )

    def _arena_of(self, fingerprint: bytes) -> Arena | None:
        if self.is_broken:
            raise RuntimeError("a bug of ours")
        return self.pool.arena_of(fingerprint)

    def attach(self, *layouts: Layout) -> None:
        for layout in layouts:
            self.pool.arena(layout)

    def open(self, layouts: list[Layout], groups: tuple[GroupBlocks, ...] = GROUPS) -> Accepted | Rejected:
        body = OpenBody(self.token, tuple(layout.fingerprint for layout in layouts), (), groups)
        sizes = make_plan((layouts[0],), groups, NUM_TOKENS).object_bytes
        self.receiving.on_open(OpenRequest(TRANSFER, "east", body.encode(), sizes, 60.0), self.answers.append)
        return self.answers[-1]

    def claim(self, groups: tuple[GroupBlocks, ...] = GROUPS) -> None:
        self.receiving.claim(self.engine, Receive(TRANSFER, self.token, CHAIN.at(NUM_TOKENS), groups))

    def heard(self) -> list[Message]:
        """What the engine is told."""
        buffer, messages = MessageBuffer(), []
        while not self.engine.outbox.empty():
            messages += buffer.feed(self.engine.outbox.get_nowait())
        return messages

    def close(self) -> None:
        self.engine_end.close()
        self.agent_end.close()
        self.pool.close()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


def _is_mismatch(messages: list[Message]) -> bool:
    return [its.reason for its in messages if isinstance(its, TransferFailed)] == ["prompt_mismatch"]


def test_an_open_of_one_model_on_all_its_ranks_is_accepted(node: Node) -> None:
    node.attach(hybrid())
    assert isinstance(node.open([hybrid()]), Accepted)


def _rank(rank: int, model: str = "hybrid") -> Layout:
    return dataclasses.replace(hybrid(model), shard=Shard(rank, 2))


@pytest.mark.parametrize(
    "layouts",
    [
        [_rank(0), _rank(1, "another")],
        [_rank(1), _rank(0)],
        [_rank(0), _rank(0)],
        [_rank(0)],
        [hybrid()] * 100_000,
        [dataclasses.replace(hybrid(), groups=hybrid().groups[:1]), hybrid("another")],
    ],
)
def test_an_open_whose_layouts_are_not_the_ranks_of_one_model_is_refused(node: Node, layouts: list[Layout]) -> None:
    node.attach(*layouts[:2])
    answer = node.open(layouts)
    assert isinstance(answer, Rejected) and answer.reason == "no_layout"


def test_an_open_that_meets_a_bug_of_ours_is_answered_all_the_same(node: Node) -> None:
    node.is_broken = True
    answer = node.open([hybrid()])
    assert isinstance(answer, Rejected) and answer.reason == "protocol"


def test_an_open_of_other_blocks_than_the_engine_waits_for_is_refused_and_the_engine_told(node: Node) -> None:
    node.attach(hybrid())
    node.claim(_groups(2))
    answer = node.open([hybrid()], GROUPS)
    assert isinstance(answer, Rejected) and answer.reason == "prompt_mismatch"
    assert _is_mismatch(node.heard())


def test_an_open_that_comes_again_with_other_blocks_is_refused(node: Node) -> None:
    node.attach(hybrid())
    assert isinstance(node.open([hybrid()], GROUPS), Accepted)
    answer = node.open([hybrid()], _groups(2))
    assert isinstance(answer, Rejected) and answer.reason == "prompt_mismatch"


def test_a_claim_of_other_blocks_than_have_arrived_is_refused(node: Node) -> None:
    node.attach(hybrid())
    node.open([hybrid()])
    node.receiving.on_event(ReceiveCompleted(TRANSFER, TransferStats(0, 0)))
    node.claim(_groups(2))
    assert _is_mismatch(node.heard())
