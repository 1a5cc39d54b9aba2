"""Prefix copies that this manager has ordered and whose end it has not heard: who sends what to whom, until when.

Single-threaded; nothing here waits. Whoever orders from outside has a bounded number of them under way. A copy ends by
its agent's word, by its source's leaving or by its deadline, always once, and the future of whoever ordered it tells
how. Ordering what is under way already gives the same future.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from prfaas import grants, logs, metrics
from prfaas.errors import IndexRefusal
from prfaas.hashing import prefix_hash
from prfaas.index.membership import Node
from prfaas.types import (
    TRANSFER_ID_BYTES,
    AgentName,
    BlockHash,
    CopyCommand,
    CopyEnd,
    CopyOutcome,
    PoolCommand,
    PoolOrder,
    Prefix,
    TransferId,
)

# Why a copy was ordered: logs, and a metric's label.
Purpose = Literal[
    "rebalance",  # many ask for the prefix
    "drain",  # its node is about to leave
    "fetch",  # a request that is about to run elsewhere needs it there
    "order",  # somebody called Copy
]
_Sameness = tuple[str, BlockHash, AgentName, AgentName, int]
GRACE_SECONDS = 2.0  # after its grant has expired a copy is over at both ends; so long its agent's word may take
_log = logs.get("manager.copies")


@dataclass(frozen=True)
class CopyOrder:
    """What is to be copied. `max_bytes` bounds what it may move."""

    prefix: Prefix
    source: Node
    destination: Node
    purpose: Purpose
    max_bytes: int
    priority: int
    seconds: float  # from order to end
    caller: str = ""  # who asked for it, and has a bounded number under way; empty: this manager itself


@dataclass(frozen=True)
class _Outstanding:
    order: CopyOrder
    command: CopyCommand
    deadline: float  # on the clock
    ended: asyncio.Future[CopyEnd]


class Copies:
    """The copies under way, by the node that sends."""

    def __init__(
        self,
        *,
        secret: bytes,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        max_per_caller: int,
    ) -> None:
        """`clock` only goes forward; `wall_clock` is seconds since 1970, which grants expire by."""
        self._grant_key = grants.derive_key(secret, "grant")
        self._clock = clock
        self._wall_clock = wall_clock
        self._max_per_caller = max_per_caller
        self._outstanding: dict[TransferId, _Outstanding] = {}
        self._same: dict[_Sameness, _Outstanding] = {}
        self._by_caller: Counter[str] = Counter()
        self.version = 0  # grows with every order, so that the streams of commands know that there is news

    def __len__(self) -> int:
        return len(self._outstanding)

    def order(self, order: CopyOrder) -> asyncio.Future[CopyEnd]:
        """Have the source's agent told, of one that is under way if this one is more urgent. The future ends with the copy and
        is never cancelled by us.

        Raises:
            IndexRefusal: its caller has as many under way as one may.
        """
        known = self._same.get(_sameness(order))
        if known is not None:
            self._hasten(known, order.priority)
            return known.ended
        if order.caller and self._by_caller[order.caller] >= self._max_per_caller:
            raise IndexRefusal(
                "too_many_copies",
                f"{order.caller} has {self._max_per_caller} copies under way, as many as max_copies_per_caller allows",
            )
        transfer_id = TransferId(secrets.token_bytes(TRANSFER_ID_BYTES))
        command = CopyCommand(transfer_id, self._grant(transfer_id, order), order.prefix, order.priority)
        ended: asyncio.Future[CopyEnd] = asyncio.get_running_loop().create_future()
        deadline = self._clock() + order.seconds + GRACE_SECONDS
        its = self._outstanding[transfer_id] = _Outstanding(order, command, deadline, ended)
        self._same[_sameness(order)] = its
        self._by_caller[order.caller] += 1
        self.version += 1
        return ended

    def _hasten(self, its: _Outstanding, priority: int) -> None:
        """Have a copy under way be as urgent as another order of it asks, as when a request comes to wait for a rebalancing."""
        if priority < its.command.priority:
            hastened = replace(its, command=replace(its.command, priority=priority))
            self._outstanding[its.command.transfer_id] = self._same[_sameness(its.order)] = hastened
            self.version += 1

    def _grant(self, transfer_id: TransferId, order: CopyOrder) -> bytes:
        grant = grants.Grant(
            transfer_id=transfer_id,
            source=order.source.name,
            destination=order.destination.name,
            destination_address=order.destination.wire_address,
            prompt_hash=order.prefix.end_hash,
            num_tokens=order.prefix.num_tokens,
            max_bytes=order.max_bytes,
            tenant="",
            expires_at=self._wall_clock() + order.seconds,
            kind="copy",
            prefix_hash=prefix_hash(order.prefix),
        )
        return grants.sign(grant, self._grant_key)

    def commands_of(self, source: AgentName) -> list[CopyCommand]:
        """What this node has to do and has not said that it is done, oldest first."""
        return [its.command for its in self._outstanding.values() if its.order.source.name == source]

    def orders(self) -> Iterator[CopyOrder]:
        """What is under way."""
        return (its.order for its in self._outstanding.values())

    def report(self, source: AgentName, end: CopyEnd) -> None:
        """An agent says how a copy ended; what is not under way, or not its own, is ignored."""
        its = self._outstanding.get(end.transfer_id)
        if its is not None and its.order.source.name == source:
            self._end(its, end)

    def expire(self, live: Collection[AgentName]) -> None:
        """End what nobody has answered in time, and what a node that is not `live` sends or receives."""
        now = self._clock()
        for its in list(self._outstanding.values()):
            silent = [name for name in (its.order.source.name, its.order.destination.name) if name not in live]
            if silent:
                self._fail(its, "unreachable", f"{silent[0]} is silent")
            elif now >= its.deadline:
                self._fail(its, "deadline", "its agent has not answered in time")

    def _fail(self, its: _Outstanding, outcome: CopyOutcome, message: str) -> None:
        self._end(its, CopyEnd(its.command.transfer_id, outcome, message))

    def _end(self, its: _Outstanding, end: CopyEnd) -> None:
        order = its.order
        del self._outstanding[end.transfer_id], self._same[_sameness(order)]
        self._by_caller -= Counter((order.caller,))
        metrics.MANAGER_COPIES.labels(purpose=order.purpose, outcome=end.outcome).inc()
        metrics.MANAGER_COPIED_BYTES.labels(purpose=order.purpose).inc(end.moved_bytes)
        _log.info(
            "copy.complete" if end.outcome == "completed" else "copy.failed",
            transfer_id=end.transfer_id.hex(),
            purpose=order.purpose,
            source=order.source.name,
            destination=order.destination.name,
            num_tokens=order.prefix.num_tokens,
            outcome=end.outcome,
            moved_bytes=end.moved_bytes,
            held_bytes=end.held_bytes,
            message=end.message,
        )
        if not its.ended.done():
            its.ended.set_result(end)


def _sameness(order: CopyOrder) -> _Sameness:
    """Equal for orders of which one is enough."""
    prefix, destination = order.prefix, order.destination
    return prefix.model, prefix.end_hash, order.source.name, destination.name, destination.epoch


@dataclass(frozen=True)
class _Given:
    node: AgentName
    command: PoolCommand
    ended: asyncio.Future[CopyEnd]


class PoolOrders:
    """The orders under way. An order comes again with each new stream of commands; carried out twice it is the same."""

    def __init__(self) -> None:
        self._given: dict[TransferId, _Given] = {}
        self.version = 0  # grows with every order, so that the streams of commands know that there is news

    async def carry_out(self, node: AgentName, end_hash: BlockHash, order: PoolOrder, *, seconds: float) -> CopyEnd:
        """How it ended; `deadline` when the node has not answered in time."""
        command = PoolCommand(TransferId(secrets.token_bytes(TRANSFER_ID_BYTES)), end_hash, order)
        given = _Given(node, command, asyncio.get_running_loop().create_future())
        self._given[command.command_id] = given
        self.version += 1
        try:
            async with asyncio.timeout(seconds):
                return await given.ended
        except TimeoutError:
            return CopyEnd(command.command_id, "deadline", "its agent has not answered in time")
        finally:
            del self._given[command.command_id]

    def commands_of(self, node: AgentName) -> list[PoolCommand]:
        """What this node has to do and has not said that it is done, oldest first."""
        return [its.command for its in self._given.values() if its.node == node]

    def report(self, node: AgentName, end: CopyEnd) -> None:
        """An agent says how an order ended; what is not under way, or not its own, is ignored."""
        given = self._given.get(end.transfer_id)
        if given is not None and given.node == node and not given.ended.done():
            given.ended.set_result(end)
