"""What an agent that was taken over can do with the grants that it has, against a real agent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import REGISTRY

from prfaas.agent.engine.protocol import Receive, ReceiveReady, Send, TransferFailed
from prfaas.agent.transfer.open_body import CopiedPrefix, OpenBody
from prfaas.agent.transfer.plan import make_plan
from prfaas.hashing import HashChain, prefix_hash
from prfaas.kv.layout import prefix_groups
from prfaas.transport.sender.api import SendCompleted, SendEvent, SendFailed
from prfaas.types import GroupBlocks, Prefix, TransferId
from tests.support.agents import (
    MODEL,
    NUM_TOKENS,
    ROOT,
    Agents,
    Engine,
    RunningAgent,
    blocks,
    chain_of,
    layout,
)
from tests.support.link_peer import Peer
from tests.support.waiting import wait_until

OURS, VICTIMS = chain_of(), chain_of(first=5000)
NUM_PREFIX_BLOCKS = NUM_TOKENS // 32 + 1  # whole ones, and the state


def _prefix(chain: HashChain) -> Prefix:
    return Prefix(MODEL, b"".join(chain.units), NUM_TOKENS, chain.at(NUM_TOKENS))


@dataclass
class Site:
    """The agent west with an engine, and east, which says what a test wants it to say."""

    west: RunningAgent
    engine: Engine
    east: Peer

    def grant(self, **changes: Any) -> tuple[TransferId, bytes]:
        """Of the first prompt."""
        transfer_id = TransferId(os.urandom(16))
        fields = {"kind": "transfer", "prompt_hash": OURS.at(NUM_TOKENS), "num_tokens": NUM_TOKENS}
        return transfer_id, self.east.grant(transfer_id, **fields | changes)

    def ordered(self) -> tuple[TransferId, bytes]:
        """A grant for a copy of the first prompt's prefix."""
        return self.grant(kind="copy", prefix_hash=prefix_hash(_prefix(OURS)))

    def send(self, transfer_id: TransferId, token: bytes, chain: HashChain) -> SendEvent:
        """Blocks named as those of a prompt."""
        groups = blocks(chain, NUM_TOKENS)
        return self._offer(transfer_id, OpenBody(token, (layout().fingerprint,), (), groups), groups)

    def copy(self, transfer_id: TransferId, token: bytes, units: bytes) -> SendEvent:
        """Blocks of the prefix that these units make."""
        body = OpenBody(token, (layout().fingerprint,), (), copied=CopiedPrefix(units, ROOT))
        return self._offer(transfer_id, body, prefix_groups(layout(), _prefix(OURS), root=ROOT))

    def _offer(self, transfer_id: TransferId, body: OpenBody, groups: tuple[GroupBlocks, ...]) -> SendEvent:
        sizes = make_plan((layout(),), groups, NUM_TOKENS).object_bytes
        self.east.offer(transfer_id, body.encode(), sizes)
        return self.east.end(transfer_id, sizes)

    def claim(self, transfer_id: TransferId, token: bytes) -> ReceiveReady | TransferFailed:
        """What the engine hears that waits for the first prompt."""
        self.engine.scheduler.post(Receive(transfer_id, token, OURS.at(NUM_TOKENS), blocks(OURS, NUM_TOKENS)))
        heard = self.engine.wait((ReceiveReady, TransferFailed))
        assert isinstance(heard, ReceiveReady | TransferFailed)
        return heard

    def has_come(self) -> None:
        """Wait until the agent knows that every byte is there."""
        wait_until(
            lambda: [transfer["outcome"] for transfer in self.west.transfers()] == ["completed"], what="its last byte"
        )


@pytest.fixture
def site(agents: Agents) -> Iterator[Site]:
    west = agents.start("west")
    made = Site(west, agents.engine(west, "w"), Peer(agents, west))
    yield made
    made.east.link.close()


def _refused(reason: str) -> float:
    return REGISTRY.get_sample_value("prfaas_agent_grants_refused_total", {"reason": reason}) or 0.0


def test_blocks_with_forged_hashes_are_never_published(site: Site) -> None:
    granted = site.grant()
    assert isinstance(site.send(*granted, VICTIMS), SendCompleted)
    site.has_come()
    assert site.west.pool()["prefix"] == 0, "nobody has claimed them"
    heard = site.claim(*granted)
    assert isinstance(heard, TransferFailed) and heard.reason == "prompt_mismatch"
    wait_until(lambda: site.west.pool()["transfer"] == 0, what="an end of the transfer")
    assert site.west.pool()["prefix"] == 0


def test_unclaimed_blocks_are_published_with_the_claim(site: Site) -> None:
    granted = site.grant()
    assert isinstance(site.send(*granted, OURS), SendCompleted)
    site.has_come()
    assert site.west.pool()["prefix"] == 0
    assert isinstance(site.claim(*granted), ReceiveReady)
    assert site.west.pool()["prefix"] == NUM_PREFIX_BLOCKS


def test_copy_accepts_only_the_granted_prefix(site: Site) -> None:
    before = _refused("other_prefix")
    units = _prefix(OURS).units
    for others in (_prefix(VICTIMS).units, units[:-16] + bytes(16), units[16:] + units[:16], units[:-16], b""):
        end = site.copy(*site.ordered(), others)
        assert isinstance(end, SendFailed) and (end.reason, end.message) == (
            "grant_refused",
            "the grant is for another prefix",
        )
    assert _refused("other_prefix") == before + 5
    assert isinstance(site.copy(*site.ordered(), units), SendCompleted)
    site.has_come()
    assert site.west.pool()["prefix"] == NUM_PREFIX_BLOCKS + 1, (
        "with the partial last block, which a state's prefix has"
    )


def test_grant_of_one_kind_allows_no_other_kind(site: Site) -> None:
    before = _refused("other_use")
    ends = [site.send(*its, OURS) for its in (site.ordered(), site.grant(kind="probe"))]
    ends += [site.copy(*its, _prefix(OURS).units) for its in (site.grant(), site.grant(kind="probe"))]
    ends += [site.east.probe(*its) for its in (site.grant(), site.ordered())]
    assert [ending.reason for ending in ends if isinstance(ending, SendFailed)] == ["grant_refused"] * 6
    assert _refused("other_use") == before + 6
    heard = site.claim(*site.ordered())
    assert isinstance(heard, TransferFailed) and heard.reason == "grant_refused"
    site.engine.scheduler.post(Send(*site.ordered(), blocks(OURS, NUM_TOKENS)))
    site.engine.fails("grant_refused")
    assert _refused("other_use") == before + 8
    assert site.west.pool()["prefix"] == 0
