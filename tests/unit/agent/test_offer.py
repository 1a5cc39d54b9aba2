"""Offers in OPENs: blocks that are listed or follow from a grant."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from prfaas.agent.transfer.grant_check import TransferRefused
from prfaas.agent.transfer.layouts import LayoutRegistry
from prfaas.agent.transfer.open_body import CopiedPrefix, OpenBody
from prfaas.agent.transfer.plan import make_plan
from prfaas.agent.transfer.receive import read_offer
from prfaas.cachepool.pool import Pool
from prfaas.errors import GrantError
from prfaas.grants import Grant
from prfaas.hashing import HashChain, prefix_hash, root_hash
from prfaas.kv.layout import prefix_groups
from prfaas.transport.protocol.messages import ObjectSizes
from prfaas.transport.receiver.api import OpenRequest
from prfaas.types import AgentName, GroupBlocks, Prefix, TransferId
from tests.support.pool_layouts import hybrid

NUM_TOKENS = 96
CHAIN = HashChain(root_hash("hybrid"), range(NUM_TOKENS))
GROUPS = (GroupBlocks(0, 0, CHAIN.blocks(32, first_block=0, num_tokens=NUM_TOKENS), CHAIN.root),)
PREFIX = Prefix(
    "hybrid", b"".join(CHAIN.blocks(16, first_block=0, num_tokens=NUM_TOKENS)), NUM_TOKENS, CHAIN.at(NUM_TOKENS)
)
GRANT = Grant(
    TransferId(bytes(16)),
    source=AgentName("east"),
    destination=AgentName("west"),
    destination_address="127.0.0.1:1",
    prompt_hash=CHAIN.at(NUM_TOKENS),
    num_tokens=NUM_TOKENS,
    max_bytes=1 << 20,
    tenant="",
    expires_at=60.0,
)
COPY = replace(GRANT, kind="copy", prefix_hash=prefix_hash(PREFIX))


@pytest.fixture
def layouts() -> Iterator[LayoutRegistry]:
    """Registry of a node whose engine has the layout."""
    with contextlib.closing(Pool(1 << 20)) as pool:
        pool.arena(hybrid())
        yield LayoutRegistry(AgentName("west"), pool)


def _request(groups: tuple[GroupBlocks, ...], *, copied: CopiedPrefix | None = None, body: bytes = b"") -> OpenRequest:
    opened = OpenBody(b"grant", (hybrid().fingerprint,), (), () if copied else groups, copied, "trace")
    sizes = make_plan((hybrid(),), groups, NUM_TOKENS).object_bytes
    return OpenRequest(bytes(16), "east", body or opened.encode(), ObjectSizes.of(sizes), 60.0)


def test_blocks_of_a_copy_follow_from_the_granted_prefix(layouts: LayoutRegistry) -> None:
    groups, copied = prefix_groups(hybrid(), PREFIX, root=CHAIN.root), CopiedPrefix(PREFIX.units, CHAIN.root)
    assert read_offer(_request(groups, copied=copied), COPY, layouts).plan.groups == groups
    for units in (PREFIX.units[:-16] + bytes(16), PREFIX.units[:-16]):
        with pytest.raises(GrantError) as refused:
            read_offer(_request(groups, copied=CopiedPrefix(units, CHAIN.root)), COPY, layouts)
        assert refused.value.reason == "other_prefix"


@pytest.mark.parametrize("grant", [replace(GRANT, max_bytes=1), replace(GRANT, num_tokens=32)], ids=["bytes", "tokens"])
def test_offer_beyond_the_grant_is_refused(layouts: LayoutRegistry, grant: Grant) -> None:
    with pytest.raises(TransferRefused) as refused:
        read_offer(_request(GROUPS), grant, layouts)
    assert refused.value.reason == "protocol"


def test_wrong_object_sizes_are_refused(layouts: LayoutRegistry) -> None:
    request = replace(_request(GROUPS), object_bytes=ObjectSizes.of([1, 2, 3]))
    with pytest.raises(TransferRefused, match="not those of the grant"):
        read_offer(request, GRANT, layouts)
