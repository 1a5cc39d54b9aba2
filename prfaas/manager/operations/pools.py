"""Operators' orders for the pools of nodes, from the call that gives one until its node has said that it is carried out."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from prfaas.types import TRANSFER_ID_BYTES, AgentName, BlockHash, CopyEnd, PoolCommand, PoolOrder, TransferId


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
