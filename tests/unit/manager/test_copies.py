"""Every ordered copy ends exactly once."""

from dataclasses import replace

import pytest

from prfaas import grants
from prfaas.errors import IndexRefusal
from prfaas.hashing import prefix_hash
from prfaas.index.membership import Node
from prfaas.manager.operations.commands import GRACE_SECONDS, Copies, CopyOrder
from prfaas.types import AgentName, BlockHash, ClusterName, CopyEnd, Prefix, TransferId

SECRET = bytes(range(32))
PREFIX = Prefix("m", bytes(32), 32, BlockHash(b"e" * 16))
LIVE = {AgentName("east"), AgentName("west"), AgentName("north")}


def _node(name: str, epoch: int = 1) -> Node:
    return Node(AgentName(name), ClusterName("c"), "pd", f"{name}:7400", epoch)


def _order(source: str = "east", destination: str = "west", *, epoch: int = 1) -> CopyOrder:
    return CopyOrder(PREFIX, _node(source), _node(destination, epoch), "order", max_bytes=100, priority=1, seconds=10.0)


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _copies(clock: _Clock, *, max_per_caller: int = 1) -> Copies:
    return Copies(secret=SECRET, clock=clock, wall_clock=clock, max_per_caller=max_per_caller)


async def test_sender_gets_a_grant_for_this_copy_until_it_reports() -> None:
    copies = _copies(_Clock())
    ended = copies.order(_order())
    (command,) = copies.commands_of(AgentName("east"))
    grant = grants.verify(command.grant, grants.derive_key(SECRET, "grant"), kind="copy", now=100.0)
    assert (grant.source, grant.destination, grant.destination_address) == ("east", "west", "west:7400")
    assert (grant.prompt_hash, grant.num_tokens, grant.max_bytes) == (PREFIX.end_hash, 32, 100)
    assert (grant.prefix_hash, grant.expires_at) == (prefix_hash(PREFIX), 110.0)
    assert copies.commands_of(AgentName("west")) == []
    end = CopyEnd(command.transfer_id, "completed", moved_bytes=7)
    copies.report(AgentName("west"), end)
    assert not ended.done(), "only the sender's word counts"
    copies.report(AgentName("east"), end)
    copies.report(AgentName("east"), end)
    assert await ended == end
    assert copies.commands_of(AgentName("east")) == [] and len(copies) == 0


async def test_repeated_order_returns_the_copy_under_way() -> None:
    copies = _copies(_Clock())
    assert copies.order(_order()) is copies.order(_order())
    assert copies.order(_order(destination="north")) is not copies.order(_order())
    assert copies.order(_order(epoch=2)) is not copies.order(_order()), "a receiver that started anew has nothing"
    assert len(copies) == 3


async def test_copies_of_callers_are_limited_but_not_the_managers() -> None:
    copies = _copies(_Clock(), max_per_caller=2)
    asked = [copies.order(replace(_order(epoch=number), caller="router")) for number in range(2)]
    assert copies.order(replace(_order(epoch=0), caller="router")) is asked[0], "the same is no further one"
    with pytest.raises(IndexRefusal, match="router has 2 copies in progress") as refused:
        copies.order(replace(_order(epoch=2), caller="router"))
    assert refused.value.reason == "too_many_copies"
    copies.order(replace(_order(epoch=3), caller="another router"))
    for number in range(4, 8):
        copies.order(_order(epoch=number))
    command, *_ = copies.commands_of(AgentName("east"))
    copies.report(AgentName("east"), CopyEnd(command.transfer_id, "completed"))
    assert copies.order(replace(_order(epoch=2), caller="router")) is not asked[0]


async def test_unreported_copy_ends_at_its_deadline() -> None:
    clock = _Clock()
    copies = _copies(clock)
    ended = copies.order(_order())
    clock.now += 10.0
    copies.expire(LIVE)
    assert not ended.done(), "its agent may still say how it ended"
    clock.now += GRACE_SECONDS
    copies.expire(LIVE)
    assert (await ended).outcome == "deadline"
    copies.report(AgentName("east"), CopyEnd(TransferId(bytes(16)), "completed"))


async def test_copy_ends_when_either_node_expires() -> None:
    for silent in ("east", "west"):
        copies = _copies(_Clock())
        ended = copies.order(_order())
        copies.expire(LIVE - {AgentName(silent)})
        assert (await ended).outcome == "unreachable"


async def test_second_order_gets_the_end_of_the_copy_in_progress() -> None:
    copies = _copies(_Clock())
    ended = copies.order(_order())
    (command,) = copies.commands_of(AgentName("east"))
    assert copies.order(replace(_order(), priority=0)) is ended
    copies.report(AgentName("east"), CopyEnd(command.transfer_id, "completed"))
    assert ended.done() and len(copies) == 0
    assert copies.order(_order()) is not ended
