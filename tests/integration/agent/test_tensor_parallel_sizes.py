"""Engines of unlike tensor-parallel sizes: what one's ranks send arrives as the blocks that the other's ranks would hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from prfaas.agent.engine.client import AgentClient
from prfaas.agent.engine.protocol import (
    HELD,
    Message,
    Receive,
    ReceiveReady,
    Release,
    Send,
    SendOpened,
    TransferDone,
    TransferFailed,
)
from prfaas.agent.engine.ring import EntryKind, RingEntry
from prfaas.connector.block_map import BlockMap
from prfaas.hashing import HashChain, root_hash
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.types import GroupBlocks, TransferId
from tests.property.cachepool.cut_models import Attention, Cut, Group, State, blocks, layouts
from tests.support.agents import Agents, RunningAgent
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools.link import Relay

NUM_TOKENS = 200
ROOT = root_hash("m")
MODELS: dict[str, tuple[Group, ...]] = {
    "windows": (Attention(4), Attention(4, kind="sliding_window", window_tokens=40)),
    "mamba2": (State("mamba2", num_groups=1), Attention(2)),
    "gated delta net": (State("gdn_attn"), State("gdn_attn"), Attention(2)),
    "latent": (State("linear"), Attention(1)),
}
CUTS = {
    "two ranks to one": (Cut(2), Cut(1)),
    "one rank to four": (Cut(1), Cut(4)),
    "four ranks to two, other lengths": (Cut(4, 16), Cut(2, 48, "token,head,content")),
}


Heard = TypeVar("Heard", SendOpened, TransferDone, TransferFailed, ReceiveReady)


class RankedEngine:
    """An engine of several ranks, by hand."""

    def __init__(
        self,
        agent: RunningAgent,
        name: str,
        groups: Sequence[Group],
        cut: Cut,
        *,
        described: Callable[[Layout], Layout] = lambda its: its,
    ) -> None:
        self._groups, self._cut = groups, cut
        self.layouts = tuple(described(layout) for layout in layouts(groups, cut))
        socket = str(agent.socket)
        self._workers = [
            AgentClient(socket, instance=name, role="worker", rank=rank, layout=its)
            for rank, its in enumerate(self.layouts)
        ]
        self.scheduler = AgentClient(socket, instance=name, role="scheduler")
        self._unread: list[Message] = []

    def lists(self, chain: HashChain) -> tuple[GroupBlocks, ...]:
        shapes = (group.without_layers for group in self.layouts[0].groups)
        return BlockMap(tuple(shapes)).transfer_groups(chain, chain.num_tokens)

    def open(self, transfer_id: TransferId, grant: bytes, chain: HashChain) -> SendOpened:
        self.scheduler.post(Send(transfer_id, grant, self.lists(chain)))
        return self.wait(SendOpened)

    def send(self, transfer_id: TransferId, grant: bytes, chain: HashChain) -> None:
        """Compute all of a transfer."""
        self.fill(self.open(transfer_id, grant, chain), chain)

    def fill(self, opened: SendOpened, chain: HashChain) -> None:
        """Compute all of a transfer that is open."""
        lists = self.lists(chain)
        held = blocks(self._groups, self._cut, lists)
        for (rank, position, block), its in held.items():
            slot = opened.slots[rank][position][block]
            if slot != HELD:
                self._memory(rank, slot, len(its))[:] = its
        for rank, worker in enumerate(self._workers):
            self._say_all(worker, self.layouts[rank], opened.handle, lists)
        self.wait(TransferDone)

    def _say_all(self, worker: AgentClient, layout: Layout, handle: int, lists: Sequence[GroupBlocks]) -> None:
        assert worker.ring is not None
        for position, its in enumerate(lists):
            for layer in range(len(layout.groups[its.group].layers)):
                worker.ring.push(RingEntry(EntryKind.LAYER_READY, handle, position, layer, 0, its.num_blocks))
        worker.ring.push(RingEntry(EntryKind.FORWARD_ENDED, handle, group=1))
        worker.ring.push(RingEntry(EntryKind.REQUEST_ENDED, handle))

    def claim(self, transfer_id: TransferId, grant: bytes, chain: HashChain) -> None:
        self.scheduler.post(Receive(transfer_id, grant, chain.at(chain.num_tokens), self.lists(chain)))

    def wrong_blocks(self, ready: ReceiveReady, chain: HashChain) -> list[tuple[int, int, int]]:
        """(rank, position, block) of what a model that resumes after the chain reads and that is not right."""
        lists, wrong = self.lists(chain), []
        for (rank, position, block), its in blocks(self._groups, self._cut, lists).items():
            got = bytes(self._memory(rank, ready.slots[rank][position][block], len(its)))
            group = self._groups[lists[position].group]
            first = (lists[position].first_block + block) * self._cut.block_tokens
            is_read = isinstance(group, State) or (
                first >= _needed(group) and first + self._cut.block_tokens <= NUM_TOKENS
            )
            if is_read and got != its:
                wrong.append((rank, position, block))
        return wrong

    def _memory(self, rank: int, slot: int, size: int) -> memoryview:
        worker = self._workers[rank]
        start = worker.attached.header_bytes + slot * worker.attached.slot_bytes
        return worker.arena[start : start + size]

    def scribble(self) -> None:
        """Write over every slot of its arenas."""
        for worker in self._workers:
            memory = worker.arena[worker.attached.header_bytes :]
            memory[:] = bytes([0xA5]) * len(memory)

    def wait(self, kind: type[Heard]) -> Heard:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._unread:
            assert time.monotonic() < deadline, f"no {kind}"
            self._unread += self.scheduler.poll(0.05)
        message = self._unread.pop(0)
        assert isinstance(message, kind), message
        return message

    def close(self) -> None:
        for client in (self.scheduler, *self._workers):
            client.close()


def _needed(group: Attention) -> int:
    """The first token that resuming reads."""
    return 0 if group.window_tokens is None else NUM_TOKENS - group.window_tokens + 1


class Site:
    """A sender in the east, a receiver in the west, their engines cut as a test says."""

    def __init__(self, agents: Agents, model: str, there: Cut, here: Cut) -> None:
        self._agents, self._groups = agents, MODELS[model]
        self._guests: list[RankedEngine] = []
        self.east, self.west = agents.start("east"), agents.start("west")
        self.sender = RankedEngine(self.east, "e", self._groups, there)
        self.receiver = self.attach("w", here)

    def attach(self, name: str, cut: Cut, *, described: Callable[[Layout], Layout] = lambda its: its) -> RankedEngine:
        """An engine in the west."""
        self._guests.append(RankedEngine(self.west, name, self._groups, cut, described=described))
        return self._guests[-1]

    def restart_west(self) -> None:
        """Another agent, which knows nothing, at the same address."""
        wire = self.west.wire
        self.west.stop()
        wait_until(lambda: not self.has_connection(), what="the sender's notice, before there is somebody to dial")
        self.west = replace(self._agents.start("west", listen=wire), wire=wire)

    def granted(self, chain: HashChain, **changes: object) -> tuple[TransferId, bytes]:
        return self._agents.grant("east", self.west, chain, **changes)

    def transfer(self, chain: HashChain, *, to: RankedEngine | None = None, **changes: object) -> ReceiveReady:
        its, reader = self.granted(chain, **changes), to or self.receiver
        reader.claim(*its, chain)
        wait_until(lambda: self.status("receiving") > 0, what="the claim")
        self.sender.send(*its, chain)
        return reader.wait(ReceiveReady)

    def status(self, name: str) -> int:
        return int(self._page()[name])

    def has_connection(self) -> bool:
        """Whether the east sends over a connection, as far as it knows."""
        return any(its["num_connections"] for its in self.east.status_page()["links"])

    def engines(self) -> list[str]:
        found: list[str] = self._page()["engines"]
        return found

    def _page(self) -> dict[str, Any]:
        found: dict[str, Any] = self.west.status_page()
        return found

    def close(self) -> None:
        for engine in (self.sender, *self._guests):
            engine.close()


SiteOf = Callable[[str, Cut, Cut], Site]


@pytest.fixture
def site_of(agents: Agents) -> Iterator[SiteOf]:
    """Makes sites, and ends them."""
    made: list[Site] = []

    def make(model: str, there: Cut, here: Cut) -> Site:
        made.append(Site(agents, model, there, here))
        return made[-1]

    yield make
    for site in made:
        site.close()


def _chain(length: int = NUM_TOKENS) -> HashChain:
    return HashChain(ROOT, range(length))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("model", MODELS)
def test_repacked_blocks_equal_the_readers_own_blocks(site_of: SiteOf, model: str, cut: str) -> None:
    site = site_of(model, *CUTS[cut])
    ready = site.transfer(_chain())
    assert site.receiver.wrong_blocks(ready, _chain()) == []
    site.receiver.scheduler.post(Release(ready.transfer_id))
    wait_until(lambda: site.east.pool()["transfer"] == site.west.pool()["transfer"] == 0, what="an end of every lease")


def test_changed_byte_is_detected(site_of: SiteOf) -> None:
    """Negative control."""
    site = site_of("windows", Cut(2), Cut(1))
    ready = site.transfer(_chain())
    site.receiver._memory(0, ready.slots[0][0][3], 1)[0] ^= 1
    assert site.receiver.wrong_blocks(ready, _chain()) == [(0, 0, 3)]


def test_blocks_held_in_the_readers_layout_are_not_sent(site_of: SiteOf) -> None:
    site = site_of("windows", Cut(2, 16), Cut(1, 32))
    first = site.transfer(_chain())
    site.receiver.scheduler.post(Release(first.transfer_id))
    longer = _chain(NUM_TOKENS + 64)
    ready = site.transfer(longer)
    assert site.receiver.wrong_blocks(ready, longer) == []
    records = site.west.transfers()
    full_block = sum(layout.groups[0].block_bytes for layout in site.sender.layouts)  # of 16 tokens on both ranks
    held = NUM_TOKENS // 32 * 32 // 16  # what lies in whole blocks of the reader
    assert records[0]["held_bytes"] == 0
    assert int(str(records[1]["held_bytes"])) >= held * full_block


def test_claim_after_the_data_is_served(site_of: SiteOf) -> None:
    site = site_of("mamba2", *CUTS["two ranks to one"])
    its = site.granted(_chain())
    site.sender.send(*its, _chain())
    site.receiver.claim(*its, _chain())
    ready = site.receiver.wait(ReceiveReady)
    assert site.receiver.wrong_blocks(ready, _chain()) == []


def test_blocks_omitted_for_one_engine_are_sent_to_another(
    site_of: SiteOf,
) -> None:
    """Blocks that the reader holds in its own layout do not come: their slots hold whatever was there before."""
    site = site_of("windows", Cut(2), Cut(1))
    first, longer = site.transfer(_chain(NUM_TOKENS - 32)), _chain()
    site.receiver.scheduler.post(Release(first.transfer_id))
    wait_until(lambda: site.status("receiving") == 0, what="an end of the first")
    twin = site.attach("twin", Cut(2))
    twin.scribble()
    ready = site.transfer(longer)
    assert int(str(site.west.transfers()[1]["held_bytes"])) > 0
    assert site.receiver.wrong_blocks(ready, longer) == []
    site.receiver.scheduler.post(Release(ready.transfer_id))
    twins = site.transfer(longer, to=twin)
    assert twin.wrong_blocks(twins, longer) == []


def _wide(layout: Layout) -> Layout:
    """The same with twice the bytes for each value."""
    return replace(
        layout, groups=tuple(replace(group, layers=tuple(map(_wide_layer, group.layers))) for group in layout.groups)
    )


def _wide_layer(its: LayerSlice) -> LayerSlice:
    return replace(its, dtype="float32", offset_bytes=2 * its.offset_bytes, payload_bytes=2 * its.payload_bytes)


def _packed(layout: Layout) -> Layout:
    return replace(layout, packing="vllm 0.32; cpu; conv=SD")


OTHERWISE = {"layer attention.0: float32": _wide, "packing: vllm 0.32; cpu": _packed}


@pytest.mark.parametrize("named", OTHERWISE)
def test_engine_with_a_changed_layout_is_refused_old_blocks(site_of: SiteOf, named: str) -> None:
    """Its agent has room in the sender's layout since it read these blocks."""
    site = site_of("windows", Cut(2), Cut(1))
    ready = site.transfer(_chain())
    site.receiver.scheduler.post(Release(ready.transfer_id))
    site.receiver.close()
    wait_until(lambda: not site.engines(), what="an end of the engine")
    site.receiver = site.attach("w", Cut(1), described=OTHERWISE[named])
    its = site.granted(_chain())
    site.receiver.claim(*its, _chain())
    wait_until(lambda: site.status("receiving") > 0, what="the claim")
    site.sender.open(*its, _chain())
    failed = site.receiver.wait(TransferFailed)
    assert failed.reason == "layout_mismatch" and named in failed.message


def test_next_transfer_works_after_a_restart_of_the_receiver(site_of: SiteOf) -> None:
    """An open to the earlier agent left out the layouts that it had accepted; the new one is told them."""
    site = site_of("windows", Cut(2), Cut(1))
    site.transfer(_chain())
    site.receiver.close()
    site.restart_west()
    site.receiver = site.attach("w", Cut(1))
    ready = site.transfer(_chain())
    assert site.receiver.wrong_blocks(ready, _chain()) == []


def test_open_transfer_survives_a_restart_of_the_receiver(site_of: SiteOf) -> None:
    """Its open to the earlier agent left out the layouts; repeated, it has them."""
    site = site_of("windows", Cut(2), Cut(1))
    with Relay(site.west.wire) as link:
        site.transfer(_chain(NUM_TOKENS - 32), destination_address=link.address)
        its = site.granted(_chain(), destination_address=link.address)
        num_before = len(site.west.transfers())
        opened = site.sender.open(*its, _chain())
        wait_until(lambda: len(site.west.transfers()) > num_before, what="the open")
        link.cut_after(0)  # until there is an engine again: who comes before it is refused
        site.receiver.close()
        site.restart_west()
        site.receiver = site.attach("w", Cut(1))
        site.receiver.claim(*its, _chain())
        link.restore()
        site.sender.fill(opened, _chain())
        assert site.receiver.wrong_blocks(site.receiver.wait(ReceiveReady), _chain()) == []


def test_differently_packed_blocks_are_refused(site_of: SiteOf) -> None:
    cpu = "vllm 0.32; cpu"
    site = site_of("windows", Cut(2, 16, packing=cpu), Cut(1, 32, packing=cpu))
    its = site.granted(_chain())
    site.receiver.claim(*its, _chain())
    wait_until(lambda: site.status("receiving") > 0, what="the claim")
    site.sender.scheduler.post(Send(its[0], its[1], site.sender.lists(_chain())))
    site.sender.wait(SendOpened)
    failed = site.sender.wait(TransferFailed)
    assert failed.reason == "layout_mismatch"
    assert "tensor-parallel size: 1 here, 2 there; group 0: blocks of 32 tokens here, 16 there" in failed.message


def test_blocks_of_another_prompt_are_refused(site_of: SiteOf) -> None:
    """Also where the two engines' blocks end at the same tokens only now and then."""
    site = site_of("windows", Cut(2, 16), Cut(1, 48))
    its = site.granted(_chain())
    site.receiver.claim(*its, _chain())
    wait_until(lambda: site.status("receiving") > 0, what="the claim")
    wrong = HashChain(ROOT, [5, *range(1, NUM_TOKENS)])
    site.sender.scheduler.post(Send(its[0], its[1], site.sender.lists(wrong)))
    site.sender.wait(SendOpened)
    failed = site.sender.wait(TransferFailed)
    assert failed.reason == "prompt_mismatch"
