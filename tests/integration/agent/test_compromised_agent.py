"""A compromised agent cannot use its grants for other blocks than granted."""

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
from tests.support.agents import MODEL, NUM_TOKENS, ROOT, Agents, Engine, RunningAgent, blocks, chain_of, layout
from tests.support.link_peer import Peer
from tests.support.waiting import wait_until

PROMPT, VICTIM_PROMPT = chain_of(), chain_of(first=5000)
# Full blocks and the state.
NUM_PREFIX_BLOCKS = NUM_TOKENS // 32 + 1


def _prefix(chain: HashChain) -> Prefix:
    return Prefix(MODEL, b"".join(chain.units), NUM_TOKENS, chain.at(NUM_TOKENS))


@dataclass
class Site:
    """The agent west with an engine, and the compromised peer east."""

    west: RunningAgent
    engine: Engine
    east: Peer

    def grant(self, **changes: Any) -> tuple[TransferId, bytes]:
        """Return a grant for the engine's prompt."""
        transfer_id = TransferId(os.urandom(16))
        fields = {"kind": "transfer", "prompt_hash": PROMPT.at(NUM_TOKENS), "num_tokens": NUM_TOKENS}
        return transfer_id, self.east.grant(transfer_id, **fields | changes)

    def copy_grant(self) -> tuple[TransferId, bytes]:
        """Return a grant for a copy of the prefix of the engine's prompt."""
        return self.grant(kind="copy", prefix_hash=prefix_hash(_prefix(PROMPT)))

    def send(self, transfer_id: TransferId, token: bytes, chain: HashChain) -> SendEvent:
        """Send blocks under the hashes of a prompt."""
        groups = blocks(chain, NUM_TOKENS)
        return self._offer(transfer_id, OpenBody(token, (layout().fingerprint,), (), groups), groups)

    def copy(self, transfer_id: TransferId, token: bytes, units: bytes) -> SendEvent:
        """Send blocks of the prefix with these hash units."""
        body = OpenBody(token, (layout().fingerprint,), (), copied=CopiedPrefix(units, ROOT))
        return self._offer(transfer_id, body, prefix_groups(layout(), _prefix(PROMPT), root=ROOT))

    def _offer(self, transfer_id: TransferId, body: OpenBody, groups: tuple[GroupBlocks, ...]) -> SendEvent:
        sizes = make_plan((layout(),), groups, NUM_TOKENS).object_bytes
        self.east.offer(transfer_id, body.encode(), sizes)
        return self.east.end(transfer_id, sizes)

    def claim(self, transfer_id: TransferId, token: bytes) -> ReceiveReady | TransferFailed:
        """Claim the engine's prompt and return the agent's answer."""
        self.engine.scheduler.post(Receive(transfer_id, token, PROMPT.at(NUM_TOKENS), blocks(PROMPT, NUM_TOKENS)))
        answer = self.engine.wait_any()
        assert isinstance(answer, ReceiveReady | TransferFailed)
        return answer

    def wait_complete(self) -> None:
        """Wait until the agent has every byte."""
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
    assert isinstance(site.send(*granted, VICTIM_PROMPT), SendCompleted)
    site.wait_complete()
    assert site.west.pool()["prefix"] == 0, "nobody has claimed them"
    answer = site.claim(*granted)
    assert isinstance(answer, TransferFailed) and answer.reason == "prompt_mismatch"
    wait_until(lambda: site.west.pool()["transfer"] == 0, what="an end of the transfer")
    assert site.west.pool()["prefix"] == 0


def test_unclaimed_blocks_are_published_with_the_claim(site: Site) -> None:
    granted = site.grant()
    assert isinstance(site.send(*granted, PROMPT), SendCompleted)
    site.wait_complete()
    assert site.west.pool()["prefix"] == 0
    assert isinstance(site.claim(*granted), ReceiveReady)
    assert site.west.pool()["prefix"] == NUM_PREFIX_BLOCKS


def test_copy_accepts_only_the_granted_prefix(site: Site) -> None:
    before = _refused("other_prefix")
    units = _prefix(PROMPT).units
    for forged_units in (
        _prefix(VICTIM_PROMPT).units,
        units[:-16] + bytes(16),
        units[16:] + units[:16],
        units[:-16],
        b"",
    ):
        end = site.copy(*site.copy_grant(), forged_units)
        assert isinstance(end, SendFailed) and (end.reason, end.message) == (
            "grant_refused",
            "the grant is for another prefix",
        )
    assert _refused("other_prefix") == before + 5
    assert isinstance(site.copy(*site.copy_grant(), units), SendCompleted)
    site.wait_complete()
    assert site.west.pool()["prefix"] == NUM_PREFIX_BLOCKS + 1, (
        "with the partial last block, which a state's prefix has"
    )


def test_grant_of_one_kind_allows_no_other_kind(site: Site) -> None:
    before = _refused("other_use")
    ends = [site.send(*site.copy_grant(), PROMPT), site.copy(*site.grant(), _prefix(PROMPT).units)]
    assert [ending.reason for ending in ends if isinstance(ending, SendFailed)] == ["grant_refused"] * 2
    assert _refused("other_use") == before + 2
    answer = site.claim(*site.copy_grant())
    assert isinstance(answer, TransferFailed) and answer.reason == "grant_refused"
    site.engine.scheduler.post(Send(*site.copy_grant(), blocks(PROMPT, NUM_TOKENS)))
    site.engine.fails("grant_refused")
    assert _refused("other_use") == before + 4
    assert site.west.pool()["prefix"] == 0
