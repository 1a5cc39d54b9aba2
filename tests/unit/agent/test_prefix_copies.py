"""Copies of prefixes: the blocks that leave, and their priority."""

import os
import time

from prfaas import grants
from prfaas.agent.prefix.replicate import PrefixCopies
from prfaas.agent.transfer.grant_check import GrantCheck
from prfaas.agent.transfer.layouts import LayoutRegistry
from prfaas.agent.transfer.log import TransferLog
from prfaas.agent.transfer.open_body import OpenBody
from prfaas.cachepool.pool import Pool
from prfaas.grants import Grant
from prfaas.hashing import HashChain, prefix_hash, root_hash
from prfaas.transport.sender.link import Link
from prfaas.types import AgentName, BlockHash, CopyCommand, CopyEnd, Prefix, TransferId
from tests.support.repack_models import Attention, Cut, layouts

KEY = b"g" * 32
CHAIN = HashChain(root_hash("m"), range(96))
# Every rank holds all of it, so four ranks take four times the bytes.
LATENT = [Attention(1)]


def _no_link(address: str, name: AgentName) -> Link:
    raise AssertionError("unexpected link")


def _command(max_bytes: int) -> CopyCommand:
    units: list[BlockHash] = [CHAIN.at(end) for end in range(16, 97, 16)]
    prefix = Prefix("m", b"".join(units), 96, CHAIN.at(96))
    grant = Grant(
        TransferId(os.urandom(16)),
        source=AgentName("west"),
        destination=AgentName("east"),
        destination_address="127.0.0.1:1",
        prompt_hash=CHAIN.at(96),
        num_tokens=96,
        max_bytes=max_bytes,
        tenant="",
        expires_at=time.time() + 60.0,
        kind="copy",
        prefix_hash=prefix_hash(prefix),
    )
    return CopyCommand(grant.transfer_id, grants.sign(grant, KEY), prefix, 0)


def test_foreign_layouts_are_not_copied() -> None:
    """They hold no prefix blocks and may exceed the granted bytes."""
    pool, ends = Pool(1 << 20), list[CopyEnd]()
    here = LayoutRegistry(AgentName("west"), pool)
    (native,), foreign = layouts(LATENT, Cut(1)), layouts(LATENT, Cut(4))
    pool.arena(native)
    here.arenas(OpenBody(b"", tuple(layout.fingerprint for layout in foreign), foreign, ()))
    copies = PrefixCopies(
        grant_check=GrantCheck(AgentName("west"), KEY),
        pool=pool,
        arenas=here.native_arenas,
        link_to=_no_link,
        transfer_log=TransferLog(),
        report=ends.append,
    )
    copies.take(_command(max_bytes=3 * native.groups[0].block_bytes))
    assert [ending.outcome for ending in ends] == ["evicted"]
    pool.close()
