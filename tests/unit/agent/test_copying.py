"""Which blocks a copy takes."""

from __future__ import annotations

import os
import time

from prfaas import grants
from prfaas.agent.copying import Copying
from prfaas.agent.layouts_here import LayoutsHere
from prfaas.agent.plan import OpenBody
from prfaas.agent.transfer_log import TransferLog
from prfaas.cachepool.pool import Pool
from prfaas.grants import Grant
from prfaas.hashing import HashChain, root_hash
from prfaas.transport.sender import Link
from prfaas.types import AgentName, BlockHash, CopyCommand, CopyEnd, Prefix, TransferId
from tests.property.cachepool.cut_models import Attention, Cut, layouts

KEY = b"g" * 32
CHAIN = HashChain(root_hash("m"), range(96))
LATENT = [Attention(1)]  # every rank holds all of it: four ranks take four times the bytes


def _no_link(address: str, name: AgentName) -> Link:
    raise AssertionError("nothing is sent")


def _command(max_bytes: int) -> CopyCommand:
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
    )
    units: list[BlockHash] = [CHAIN.at(end) for end in range(16, 97, 16)]
    prefix = Prefix("m", b"".join(units), 96, CHAIN.at(96))
    return CopyCommand(grant.transfer_id, grants.sign(grant, KEY), prefix, 0)


def test_layouts_that_no_engine_here_has_take_no_part_in_a_copy() -> None:
    """They hold no prefix blocks, and may be larger than the grant allows."""
    pool, ends = Pool(1 << 20), list[CopyEnd]()
    here = LayoutsHere(AgentName("west"), pool)
    (ours,), theirs = layouts(LATENT, Cut(1)), layouts(LATENT, Cut(4))
    pool.arena(ours)
    here.arenas(OpenBody(b"", tuple(its.fingerprint for its in theirs), theirs, ()))
    copying = Copying(
        name=AgentName("west"),
        grant_key=KEY,
        pool=pool,
        arenas=here.native_arenas,
        ssd=None,
        link_to=_no_link,
        transfer_log=TransferLog(),
        report=ends.append,
    )
    copying.take(_command(max_bytes=3 * ours.groups[0].block_bytes))
    assert [its.outcome for its in ends] == ["evicted"]
    pool.close()
