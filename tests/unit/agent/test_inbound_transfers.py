"""Inbound transfers at an agent without a wire: every OPEN and claim gets its answer."""

import dataclasses
import socket
import time
import tracemalloc
from collections.abc import Callable, Collection, Iterator

import msgpack
import pytest

from prfaas import grants
from prfaas.agent.engine.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Message,
    MessageBuffer,
    Receive,
    ReceiveReady,
    TransferFailed,
)
from prfaas.agent.engine.server import EngineConnection
from prfaas.agent.transfer.grant_check import GrantCheck, TransferRefused
from prfaas.agent.transfer.layouts import DESCRIBED_PERIOD_SECONDS, MAX_DESCRIBED_BYTES, LayoutRegistry
from prfaas.agent.transfer.log import TransferLog
from prfaas.agent.transfer.open_body import MAX_RANKS, OpenBody
from prfaas.agent.transfer.plan import make_plan
from prfaas.agent.transfer.receive import CLAIM_TIMEOUT_SECONDS, InboundTransfers
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.grants import Grant
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.transport.protocol.messages import MAX_MESSAGE_CHARACTERS, ObjectSizes, TransferStats
from prfaas.transport.receiver.api import (
    Acceptance,
    OpenRequest,
    ReceiveCompleted,
    ReceiveFailed,
    ReceiveMemoryFree,
    Rejection,
)
from prfaas.transport.receiver.transfers import shorten
from prfaas.types import AgentName, BlockHash, GroupBlocks, Shard, TransferId
from tests.support.pool_integrity import check_integrity
from tests.support.pool_layouts import hybrid
from tests.support.repack_models import Attention, Cut, layouts

KEY = b"g" * 32
NUM_TOKENS = 96
CHAIN = HashChain(root_hash("hybrid"), range(NUM_TOKENS))
TRANSFER = TransferId(bytes(range(16)))


def _groups(num_blocks: int) -> tuple[GroupBlocks, ...]:
    return (GroupBlocks(0, 0, CHAIN.blocks(32, first_block=0, num_tokens=32 * num_blocks), CHAIN.root),)


GROUPS = _groups(3)


class FragileLayouts(LayoutRegistry):
    """Registry that raises when told to, and counts reads of descriptions."""

    is_broken = False
    num_reads = 0

    def wants_description(self, peer: str, fingerprints: Collection[bytes], num_bytes: int) -> bool:
        self.num_reads += 1
        return super().wants_description(peer, fingerprints, num_bytes)

    def arenas(self, opened: OpenBody) -> tuple[Arena, ...]:
        if self.is_broken:
            raise RuntimeError("a bug")
        return super().arenas(opened)


class Node:
    """Receiving part of an agent, and one engine beside it."""

    def __init__(self) -> None:
        self.pool = Pool(1 << 20)
        self.engine_end, self.agent_end = socket.socketpair()
        attach = Attach(PROTOCOL_VERSION, "w", "scheduler", 0, None)
        self.engine = EngineConnection(attach, None, None, None, self.agent_end)
        self.layouts = FragileLayouts(AgentName("west"), self.pool)
        self.arenas: tuple[Arena, ...] = ()
        self.background: list[Callable[[], None]] = []
        self.holds_background = False
        self.transfers = InboundTransfers(
            grant_check=GrantCheck(AgentName("west"), KEY),
            pool=self.pool,
            layouts=self.layouts,
            transfer_log=TransferLog(),
            open_timeout_seconds=10.0,
            in_background=self._in_background,
        )
        self.answers: list[Acceptance | Rejection] = []
        self.token = b""
        self.grant()

    def grant(self, *, num_tokens: int = NUM_TOKENS, max_bytes: int = 1 << 20) -> None:
        granted = Grant(
            TRANSFER,
            source=AgentName("east"),
            destination=AgentName("west"),
            destination_address="127.0.0.1:1",
            prompt_hash=CHAIN.at(NUM_TOKENS),
            num_tokens=num_tokens,
            max_bytes=max_bytes,
            tenant="",
            expires_at=time.time() + 60.0,
        )
        self.token = grants.sign(granted, KEY)

    def _in_background(self, work: Callable[[], None], then: Callable[[bool], None]) -> None:
        def run() -> None:
            work()
            then(True)

        self.background.append(run)
        if not self.holds_background:
            self.run_background()

    def run_background(self) -> None:
        while self.background:
            self.background.pop()()

    def attach(self, *layouts: Layout) -> None:
        self.arenas = tuple(self.pool.arena(layout) for layout in layouts)

    def open(
        self,
        layouts: list[Layout],
        groups: tuple[GroupBlocks, ...] = GROUPS,
        *,
        is_described: bool = False,
        sizes: list[int] | None = None,
    ) -> Acceptance | Rejection:
        described = tuple(layouts) if is_described else ()
        body = OpenBody(self.token, tuple(layout.fingerprint for layout in layouts), described, groups)
        sizes = sizes or make_plan((layouts[0],), groups, NUM_TOKENS).object_bytes
        self.transfers.on_open(
            OpenRequest(TRANSFER, "east", body.encode(), ObjectSizes.of(sizes), 60.0), self.answers.append
        )
        return self.answers[-1]

    def claim(self, groups: tuple[GroupBlocks, ...] = GROUPS, *, engine: EngineConnection | None = None) -> None:
        request = Receive(TRANSFER, self.token, CHAIN.at(NUM_TOKENS), groups)
        self.transfers.claim(engine or self.engine, self.arenas, request)

    def complete(self) -> None:
        """Report all bytes, and the end of the transport's writes."""
        self.transfers.on_event(ReceiveCompleted(TRANSFER, TransferStats(0, 0)))
        self.transfers.on_event(ReceiveMemoryFree(TRANSFER))

    def heard(self, engine: EngineConnection | None = None) -> list[Message]:
        """Return the messages to the engine."""
        buffer, messages, outbox = MessageBuffer(), [], (engine or self.engine).outbox
        while not outbox.empty():
            messages += buffer.feed(outbox.get_nowait())
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
    return [message.reason for message in messages if isinstance(message, TransferFailed)] == ["prompt_mismatch"]


def _rank(rank: int, model: str = "hybrid") -> Layout:
    return dataclasses.replace(hybrid(model), shard=Shard(rank, 2))


@pytest.mark.parametrize(
    "layouts",
    [
        [_rank(0), _rank(1, "another")],
        [_rank(1), _rank(0)],
        [_rank(0), _rank(0)],
        [_rank(0)],
        [hybrid()] * MAX_RANKS,
        [dataclasses.replace(hybrid(), groups=hybrid().groups[:1]), hybrid("another")],
    ],
)
def test_open_with_wrong_ranks_is_refused(node: Node, layouts: list[Layout]) -> None:
    node.attach(*layouts[:2])
    answer = node.open(layouts)
    assert isinstance(answer, Rejection) and answer.reason == "no_layout"


@pytest.mark.parametrize("granted", [{"max_bytes": 1}, {"num_tokens": 32}], ids=["bytes", "tokens"])
def test_open_beyond_its_grant_is_refused(node: Node, granted: dict[str, int]) -> None:
    node.attach(hybrid())
    node.grant(**granted)
    answer = node.open([hybrid()])
    assert isinstance(answer, Rejection) and answer.reason == "protocol"


def test_open_with_wrong_object_sizes_is_refused(node: Node) -> None:
    node.attach(hybrid())
    answer = node.open([hybrid()], sizes=[1, 2, 3])
    assert isinstance(answer, Rejection) and answer.reason == "protocol"


@pytest.mark.parametrize("has_come", [False, True])
def test_claim_without_blocks_cancels_the_transfer(node: Node, has_come: bool) -> None:
    node.attach(hybrid())
    if has_come:
        node.open([hybrid()])
        node.complete()
    node.claim(())
    assert [message.reason for message in node.heard() if isinstance(message, TransferFailed)] == ["cancelled"]
    assert len(node.transfers) == 0
    again = node.open([hybrid()])
    assert isinstance(again, Rejection) and again.reason == "cancelled"


def test_open_is_answered_even_if_the_agent_has_a_bug(node: Node) -> None:
    node.layouts.is_broken = True
    answer = node.open([hybrid()])
    assert isinstance(answer, Rejection) and answer.reason == "protocol"


def test_open_with_other_blocks_than_claimed_is_refused(node: Node) -> None:
    node.attach(hybrid())
    node.claim(_groups(2))
    answer = node.open([hybrid()], GROUPS)
    assert isinstance(answer, Rejection) and answer.reason == "prompt_mismatch"
    assert _is_mismatch(node.heard())


def test_repeated_open_with_other_blocks_is_refused(node: Node) -> None:
    node.attach(hybrid())
    assert isinstance(node.open([hybrid()], GROUPS), Acceptance)
    answer = node.open([hybrid()], _groups(2))
    assert isinstance(answer, Rejection) and answer.reason == "prompt_mismatch"


def test_claim_of_other_blocks_than_arrived_is_refused(node: Node) -> None:
    node.attach(hybrid())
    node.open([hybrid()])
    node.transfers.on_event(ReceiveCompleted(TRANSFER, TransferStats(0, 0)))
    node.claim(_groups(2))
    assert _is_mismatch(node.heard())


def test_hashes_that_the_reader_cannot_confirm_are_not_published(node: Node) -> None:
    """The reader's blocks are twice as long, so it names only every second hash of the sender."""
    (native,), (foreign,) = (layouts([Attention(4)], Cut(1, block_tokens)) for block_tokens in (32, 16))
    arena = node.pool.arena(foreign)
    node.attach(native)
    planted = BlockHash(b"victim's prefix!")
    hashes = CHAIN.blocks(16, first_block=0, num_tokens=NUM_TOKENS)
    node.claim()
    assert isinstance(node.open([foreign], (GroupBlocks(0, 0, (planted, *hashes[1:]), CHAIN.root),)), Acceptance)
    node.complete()
    assert [type(message) for message in node.heard()] == [ReceiveReady]
    assert node.pool.find_all(arena, 0, (planted, *hashes)) == [None] * 7


def test_late_claim_and_late_open_get_the_reason(node: Node) -> None:
    node.attach(hybrid())
    node.open([hybrid()])
    why = "the request ended before all its layers came"
    node.transfers.on_event(ReceiveFailed(TRANSFER, "east", "incomplete", why))
    node.claim()
    (failed,) = node.heard()
    assert isinstance(failed, TransferFailed)
    assert (failed.reason, failed.message) == ("incomplete", why)
    assert node.open([hybrid()]) == Rejection("incomplete", why)


def test_cancel_before_open_fails_later_claim_and_open(node: Node) -> None:
    node.attach(hybrid())
    node.transfers.on_event(ReceiveFailed(TRANSFER, "east", "cancelled", "no longer wanted"))
    node.claim()
    (failed,) = node.heard()
    assert isinstance(failed, TransferFailed)
    assert (failed.reason, failed.message) == ("cancelled", "no longer wanted")
    assert node.open([hybrid()]) == Rejection("cancelled", "no longer wanted")


def test_open_without_valid_grant_is_not_read_further(node: Node) -> None:
    """Its 15 MiB would unpack to a gigabyte of empty lists."""
    forged = msgpack.packb(["open", bytes(100)])
    body = b"\x95" + forged[1:] + b"\xdd" + (15 << 20).to_bytes(4, "big") + b"\x90" * (15 << 20)
    tracemalloc.start()
    node.transfers.on_open(OpenRequest(TRANSFER, "east", body, ObjectSizes.of([100]), 60.0), node.answers.append)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    (answer,) = node.answers
    assert isinstance(answer, Rejection) and answer.reason == "grant_refused"


def _long(model: str) -> Layout:
    """Return a layout with a description of about 170 KB."""
    layers = tuple(LayerSlice(f"{number:64}", number, 1, "bfloat16", "head,token,kv_dim") for number in range(1000))
    return Layout(model, "", Shard(), (KVGroup("full_attention", 32, layers),))


def test_unknown_layouts_are_read_up_to_a_limit_per_period(node: Node) -> None:
    layouts, num_bytes = node.layouts, MAX_DESCRIBED_BYTES // 4
    assert layouts.wants_description("east", (b"unknown",), num_bytes)
    with pytest.raises(TransferRefused, match="too many layouts"):
        layouts.wants_description("east", (b"unknown",), MAX_DESCRIBED_BYTES)
    assert layouts.wants_description("north", (b"unknown",), num_bytes), "another peer has its own share"
    native = _long("m")
    node.attach(native)
    assert not layouts.wants_description("east", (native.fingerprint,), num_bytes), "a known layout is not read"
    node.transfers.expire(time.monotonic() + 2 * DESCRIBED_PERIOD_SECONDS)
    assert layouts.wants_description("east", (b"unknown",), num_bytes)


def test_refused_layouts_are_read_once_per_grant(node: Node) -> None:
    node.attach(hybrid())
    strange = dataclasses.replace(hybrid(), packing="another")
    first = node.open([strange], is_described=True)
    assert isinstance(first, Rejection) and first.reason == "layout_mismatch"
    assert node.layouts.num_reads == 1
    assert node.open([strange], is_described=True) == first
    assert node.layouts.num_reads == 1
    node.claim()
    (failed,) = node.heard()
    assert isinstance(failed, TransferFailed) and (failed.reason, failed.message) == (first.reason, first.message)


def test_refusal_message_is_cut_to_the_limit(node: Node) -> None:
    node.attach(hybrid())
    answer = node.open([dataclasses.replace(hybrid(), packing="x" * 100_000)], is_described=True)
    assert isinstance(answer, Rejection) and len(answer.message) == MAX_MESSAGE_CHARACTERS
    assert node.open([hybrid()]) == Rejection(answer.reason, shorten(answer.message)), (
        "the outcome is remembered in short form"
    )


def test_second_claim_is_refused_and_the_first_served(node: Node) -> None:
    node.attach(hybrid())
    node.claim()
    late = EngineConnection(Attach(PROTOCOL_VERSION, "late", "scheduler", 0, None), None, None, None, node.agent_end)
    node.claim(engine=late)
    (refused,) = node.heard(late)
    assert isinstance(refused, TransferFailed)
    assert (refused.reason, refused.message) == ("grant_refused", "w has claimed this transfer already")
    node.transfers.release(TRANSFER, "late")
    node.open([hybrid()])
    node.complete()
    assert [type(message) for message in node.heard()] == [ReceiveReady]


@pytest.fixture
def repacking(node: Node) -> Node:
    """Node with a complete transfer of one rank, claimed by an engine of two: a repack job is pending."""
    ranks, (foreign,) = (layouts([Attention(4)], Cut(size)) for size in (2, 1))
    node.pool.arena(foreign)
    node.attach(*ranks)
    node.holds_background = True
    assert isinstance(node.open([foreign]), Acceptance)
    node.claim()
    node.complete()
    assert node.background and not node.heard()
    return node


def test_reader_that_leaves_during_repacking_leaks_nothing(repacking: Node) -> None:
    repacking.transfers.release(TRANSFER, "w")
    assert repacking.pool.stats().num_leases == 1, "the blocks that the job writes"
    repacking.run_background()
    assert repacking.pool.stats().num_leases == 0
    assert not repacking.heard()
    check_integrity(repacking.pool)


def test_repacking_outlives_the_grant(repacking: Node) -> None:
    repacking.transfers.expire(time.monotonic() + 3600)
    repacking.run_background()
    assert [type(message) for message in repacking.heard()] == [ReceiveReady]


def test_complete_transfer_that_no_engine_claims_is_freed_within_seconds(node: Node) -> None:
    node.attach(hybrid())
    node.open([hybrid()])
    node.complete()
    now = time.monotonic()
    node.transfers.expire(now + CLAIM_TIMEOUT_SECONDS - 1)
    assert len(node.transfers) == 1
    node.transfers.expire(now + CLAIM_TIMEOUT_SECONDS)
    assert len(node.transfers) == 0 and node.pool.stats().num_leases == 0
    node.claim()
    (failed,) = node.heard()
    assert isinstance(failed, TransferFailed) and failed.reason == "cancelled"


def test_claimed_transfer_outlives_the_claim_timeout(node: Node) -> None:
    node.attach(hybrid())
    node.open([hybrid()])
    node.complete()
    node.claim()
    node.transfers.expire(time.monotonic() + 3600)
    assert [type(message) for message in node.heard()] == [ReceiveReady]
    assert len(node.transfers) == 1
