"""Transfers between engines of different layouts arrive as blocks of the reader's layout."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from prfaas.agent.engine.protocol import (
    HELD,
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
from prfaas.types import GroupBlocks, TransferId
from tests.support.agents import Agents, AttachedEngine, RunningAgent
from tests.support.repack_models import Attention, Cut, Group, State, blocks, layouts
from tests.support.waiting import wait_until
from tools.link import Relay

NUM_TOKENS = 200
ROOT = root_hash("m")
MODELS: dict[str, tuple[Group, ...]] = {
    "windows": (Attention(4), Attention(4, kind="sliding_window", window_tokens=40)),
    "mamba2": (State("mamba2", num_groups=1), Attention(2)),
    "gated delta net": (State("gdn_attn"), State("gdn_attn"), Attention(2)),
    "latent": (State("linear"), Attention(1)),
    "divided latent": (State("gdn_attn"), Attention(1, divided=True)),
}
CUTS = {
    "two ranks to one": (Cut(2), Cut(1)),
    "one rank to four": (Cut(1), Cut(4)),
    "four ranks to two, other lengths": (Cut(4, 16), Cut(2, 48, "token,head,content")),
    "eight ranks to one": (Cut(8), Cut(1)),
    "one rank to eight": (Cut(1), Cut(8)),
    "eight ranks to two": (Cut(8), Cut(2)),
    "equal sizes, other order and lengths": (Cut(2, 16), Cut(2, 48, "token,head,content")),
}


class RankedEngine(AttachedEngine):
    """Engine of several ranks, which does by hand what a connector does."""

    def __init__(
        self,
        agent: RunningAgent,
        name: str,
        groups: Sequence[Group],
        cut: Cut,
        *,
        described: Callable[[Layout], Layout] = lambda layout: layout,
    ) -> None:
        self._groups, self._cut = groups, cut
        super().__init__(agent, name, *map(described, layouts(groups, cut)))

    def block_lists(self, chain: HashChain) -> tuple[GroupBlocks, ...]:
        shapes = (replace(group, layers=()) for group in self.layouts[0].groups)
        return BlockMap(tuple(shapes)).transfer_groups(chain, chain.num_tokens)

    def open(self, transfer_id: TransferId, grant: bytes, chain: HashChain) -> SendOpened:
        self.scheduler.post(Send(transfer_id, grant, self.block_lists(chain)))
        return self.wait(SendOpened)

    def send(self, transfer_id: TransferId, grant: bytes, chain: HashChain) -> None:
        """Open a transfer and write all its blocks."""
        self.fill(self.open(transfer_id, grant, chain), chain)

    def fill(self, opened: SendOpened, chain: HashChain) -> None:
        """Write all blocks of an open transfer."""
        lists = self.block_lists(chain)
        held = blocks(self._groups, self._cut, lists)
        for (rank, position, block), content in held.items():
            slot = opened.slots[rank][position][block]
            if slot != HELD:
                self.slot(slot, 0, len(content), rank=rank)[:] = content
        for rank in range(len(self.layouts)):
            self._report_all(rank, opened.handle, lists)
        self.wait(TransferDone)

    def _report_all(self, rank: int, handle: int, lists: Sequence[GroupBlocks]) -> None:
        for position, group in enumerate(lists):
            for layer in range(len(self.layouts[rank].groups[group.group].layers)):
                self.push(RingEntry(EntryKind.LAYER_READY, handle, position, layer, 0, group.num_blocks), rank=rank)
        self.push(RingEntry(EntryKind.FORWARD_ENDED, handle, group=1), rank=rank)
        self.push(RingEntry(EntryKind.REQUEST_ENDED, handle), rank=rank)

    def claim(self, transfer_id: TransferId, grant: bytes, chain: HashChain) -> None:
        self.scheduler.post(Receive(transfer_id, grant, chain.at(chain.num_tokens), self.block_lists(chain)))

    def wrong_blocks(self, ready: ReceiveReady, chain: HashChain) -> list[tuple[int, int, int]]:
        """Return (rank, position, block) of each wrong block that a model reads to resume after the chain."""
        lists, wrong = self.block_lists(chain), []
        for (rank, position, block), content in blocks(self._groups, self._cut, lists).items():
            got = bytes(self.slot(ready.slots[rank][position][block], 0, len(content), rank=rank))
            group = self._groups[lists[position].group]
            first = (lists[position].first_block + block) * self._cut.block_tokens
            is_read = isinstance(group, State) or (
                first >= _needed(group) and first + self._cut.block_tokens <= NUM_TOKENS
            )
            if is_read and got != content:
                wrong.append((rank, position, block))
        return wrong

    def scribble(self) -> None:
        """Overwrite every slot of the arenas."""
        for worker in self.workers:
            memory = worker.arena[worker.attached.header_bytes :]
            memory[:] = bytes([0xA5]) * len(memory)


def _needed(group: Attention) -> int:
    """Return the first token that a resumed request reads."""
    return 0 if group.window_tokens is None else NUM_TOKENS - group.window_tokens + 1


class Site:
    """Sender east and receiver west, with engines of the given sizes."""

    def __init__(self, agents: Agents, model: str, there: Cut, here: Cut) -> None:
        self._agents, self._groups = agents, MODELS[model]
        self._guests: list[RankedEngine] = []
        self.east, self.west = agents.start("east"), agents.start("west")
        self.sender = RankedEngine(self.east, "e", self._groups, there)
        self.receiver = self.attach("w", here)

    def attach(
        self, name: str, cut: Cut, *, described: Callable[[Layout], Layout] = lambda layout: layout
    ) -> RankedEngine:
        """Attach an engine to the receiving agent."""
        self._guests.append(RankedEngine(self.west, name, self._groups, cut, described=described))
        return self._guests[-1]

    def restart_west(self) -> None:
        """Replace the receiving agent by a new one at the same address."""
        wire = self.west.wire
        self.west.stop()
        wait_until(lambda: not self.has_connection(), what="the sender's lost connection")
        self.west = replace(self._agents.start("west", listen=wire), wire=wire)

    def granted(self, chain: HashChain, **changes: object) -> tuple[TransferId, bytes]:
        return self._agents.grant("east", self.west, chain, **changes)

    def transfer(self, chain: HashChain, *, to: RankedEngine | None = None, **changes: object) -> ReceiveReady:
        grant, reader = self.granted(chain, **changes), to or self.receiver
        reader.claim(*grant, chain)
        wait_until(lambda: self.status("receiving") > 0, what="the claim")
        self.sender.send(*grant, chain)
        return reader.wait(ReceiveReady)

    def status(self, name: str) -> int:
        return int(self._page()[name])

    def has_connection(self) -> bool:
        """Return whether the sender has a connection."""
        return any(link["num_connections"] for link in self.east.status_page()["links"])

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
    """Factory of sites, which end with the test."""
    made: list[Site] = []

    def make(model: str, there: Cut, here: Cut) -> Site:
        made.append(Site(agents, model, there, here))
        return made[-1]

    yield make
    for site in made:
        site.close()


def _chain(length: int = NUM_TOKENS) -> HashChain:
    return HashChain(ROOT, range(length))


@pytest.mark.parametrize(
    ("model", "cut"),
    [
        ("windows", "two ranks to one"),
        ("mamba2", "one rank to four"),
        ("gated delta net", "four ranks to two, other lengths"),
        ("latent", "equal sizes, other order and lengths"),
        ("latent", "one rank to four"),
        ("divided latent", "eight ranks to one"),
        ("divided latent", "one rank to eight"),
        ("divided latent", "eight ranks to two"),
        ("windows", "equal sizes, other order and lengths"),
    ],
)
def test_repacked_blocks_equal_the_readers_own_blocks(site_of: SiteOf, model: str, cut: str) -> None:
    site = site_of(model, *CUTS[cut])
    ready = site.transfer(_chain())
    assert site.receiver.wrong_blocks(ready, _chain()) == []
    site.receiver.scheduler.post(Release(ready.transfer_id))
    wait_until(lambda: site.east.pool()["transfer"] == site.west.pool()["transfer"] == 0, what="an end of every lease")


def test_blocks_held_in_the_readers_layout_are_not_sent(site_of: SiteOf) -> None:
    site = site_of("windows", Cut(2, 16), Cut(1, 32))
    first = site.transfer(_chain())
    site.receiver.scheduler.post(Release(first.transfer_id))
    longer = _chain(NUM_TOKENS + 64)
    ready = site.transfer(longer)
    assert site.receiver.wrong_blocks(ready, longer) == []
    records = site.west.transfers()
    # A block of 16 tokens on both ranks.
    full_block = sum(layout.groups[0].block_bytes for layout in site.sender.layouts)
    # Only full blocks of the reader count.
    held = NUM_TOKENS // 32 * 32 // 16
    assert records[0]["held_bytes"] == 0
    assert int(str(records[1]["held_bytes"])) >= held * full_block


def test_blocks_omitted_for_one_engine_are_sent_to_another(site_of: SiteOf) -> None:
    """Slots of blocks that the sender omitted keep earlier bytes, so no other engine may read them."""
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


def _packed(layout: Layout) -> Layout:
    return replace(layout, packing="vllm 0.32; cpu; conv=SD")


def test_engine_with_a_changed_layout_is_refused_old_blocks(site_of: SiteOf) -> None:
    """The agent still has an arena in the sender's layout."""
    site = site_of("windows", Cut(2), Cut(1))
    ready = site.transfer(_chain())
    site.receiver.scheduler.post(Release(ready.transfer_id))
    site.receiver.close()
    wait_until(lambda: not site.engines(), what="an end of the engine")
    site.receiver = site.attach("w", Cut(1), described=_packed)
    granted = site.granted(_chain())
    site.receiver.claim(*granted, _chain())
    wait_until(lambda: site.status("receiving") > 0, what="the claim")
    site.sender.open(*granted, _chain())
    failed = site.receiver.wait(TransferFailed)
    assert failed.reason == "layout_mismatch" and "packing: vllm 0.32; cpu" in failed.message


def test_open_transfer_survives_a_restart_of_the_receiver(site_of: SiteOf) -> None:
    """The repeated OPEN has the layout descriptions that the first OPEN omitted."""
    site = site_of("windows", Cut(2), Cut(1))
    with Relay(site.west.wire) as link:
        site.transfer(_chain(NUM_TOKENS - 32), destination_address=link.address)
        granted = site.granted(_chain(), destination_address=link.address)
        num_before = len(site.west.transfers())
        opened = site.sender.open(*granted, _chain())
        wait_until(lambda: len(site.west.transfers()) > num_before, what="the open")
        # A sender that connects before the engine attaches would be refused.
        link.cut_after(0)
        site.receiver.close()
        site.restart_west()
        site.receiver = site.attach("w", Cut(1))
        site.receiver.claim(*granted, _chain())
        link.restore()
        site.sender.fill(opened, _chain())
        assert site.receiver.wrong_blocks(site.receiver.wait(ReceiveReady), _chain()) == []


def test_differently_packed_blocks_are_refused(site_of: SiteOf) -> None:
    cpu = "vllm 0.32; cpu"
    site = site_of("windows", Cut(2, 16, packing=cpu), Cut(1, 32, packing=cpu))
    granted = site.granted(_chain())
    site.receiver.claim(*granted, _chain())
    wait_until(lambda: site.status("receiving") > 0, what="the claim")
    site.sender.scheduler.post(Send(*granted, site.sender.block_lists(_chain())))
    site.sender.wait(SendOpened)
    failed = site.sender.wait(TransferFailed)
    assert failed.reason == "layout_mismatch"
    assert "tensor-parallel size: 1 here, 2 there; group 0: blocks of 32 tokens here, 16 there" in failed.message


def test_blocks_of_another_prompt_are_refused(site_of: SiteOf) -> None:
    """Also where the two engines' blocks end at the same tokens only now and then."""
    site = site_of("windows", Cut(2, 16), Cut(1, 48))
    granted = site.granted(_chain())
    site.receiver.claim(*granted, _chain())
    wait_until(lambda: site.status("receiving") > 0, what="the claim")
    wrong = HashChain(ROOT, [5, *range(1, NUM_TOKENS)])
    site.sender.scheduler.post(Send(*granted, site.sender.block_lists(wrong)))
    site.sender.wait(SendOpened)
    failed = site.sender.wait(TransferFailed)
    assert failed.reason == "prompt_mismatch"
