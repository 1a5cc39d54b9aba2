"""Commands to agents that are in progress: prefix copies.

Single-threaded and never waits. A copy ends once: by its agent's report, because a node leaves, or by its deadline. The
caller's future then has the result. An order for a copy that is in progress returns the same future.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from prfaas import grants, logs, metrics
from prfaas.errors import IndexRefusal
from prfaas.hashing import prefix_hash
from prfaas.index.membership import Node
from prfaas.types import TRANSFER_ID_BYTES, AgentName, BlockHash, CopyCommand, CopyEnd, CopyOutcome, Prefix, TransferId

# Reason of a copy, for logs and a metric's label.
Purpose = Literal[
    "rebalance",  # Many requests need the prefix.
    "drain",  # The node is about to leave.
    "fetch",  # A request will run on another node.
    "order",  # An operator called Copy.
]
_CopyIdentity = tuple[str, BlockHash, AgentName, AgentName, int]
MAX_COPIES_PER_CALLER = 1024  # Bound for all routers together, and for each operator.
GRACE_SECONDS = 2.0  # Allowance for the agent's report after the grant has expired at both ends.
_log = logs.get("manager.copies")


@dataclass(frozen=True)
class CopyOrder:
    """Order of a prefix copy that may move at most `max_bytes`."""

    prefix: Prefix
    source: Node
    destination: Node
    purpose: Purpose
    max_bytes: int
    priority: int
    seconds: float  # From order to end.
    caller: str = ""  # Caller with a limited number of copies; empty: this manager.


@dataclass(frozen=True)
class _PendingCopy:
    order: CopyOrder
    command: CopyCommand
    deadline: float
    ended: asyncio.Future[CopyEnd]


class Copies:
    """Copies in progress, by the sending node."""

    def __init__(
        self,
        *,
        secret: bytes,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        max_per_caller: int = MAX_COPIES_PER_CALLER,
    ) -> None:
        """`clock` is monotonic; `wall_clock` is Unix time, for grants."""
        self._max_per_caller = max_per_caller
        self._grant_key = grants.derive_key(secret, "grant")
        self._clock = clock
        self._wall_clock = wall_clock
        self._pending: dict[TransferId, _PendingCopy] = {}
        self._by_identity: dict[_CopyIdentity, _PendingCopy] = {}
        self._by_caller: Counter[str] = Counter()
        self.version = 0  # Grows with every command, which tells command streams that there is something new.

    def __len__(self) -> int:
        return len(self._pending)

    def order(self, order: CopyOrder) -> asyncio.Future[CopyEnd]:
        """Command the source's agent to copy, and return a future of the end that is never cancelled.

        If the same copy is in progress, its future is returned.

        Raises:
            IndexRefusal: the caller has too many copies in progress.
        """
        same = self._by_identity.get(_identity(order))
        if same is not None:
            return same.ended
        if order.caller and self._by_caller[order.caller] >= self._max_per_caller:
            raise IndexRefusal(
                "too_many_copies", f"{order.caller} has {self._max_per_caller} copies in progress, which is the limit"
            )
        transfer_id = TransferId(secrets.token_bytes(TRANSFER_ID_BYTES))
        command = CopyCommand(transfer_id, self._grant(transfer_id, order), order.prefix, order.priority)
        ended: asyncio.Future[CopyEnd] = asyncio.get_running_loop().create_future()
        deadline = self._clock() + order.seconds + GRACE_SECONDS
        pending = _PendingCopy(order, command, deadline, ended)
        self._pending[transfer_id] = self._by_identity[_identity(order)] = pending
        self._by_caller[order.caller] += 1
        self.version += 1
        return ended

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
        """Return the commands that this node has not reported yet, oldest first."""
        return [copy.command for copy in self._pending.values() if copy.order.source.name == source]

    def orders(self) -> Iterator[CopyOrder]:
        """Return the copies in progress."""
        return (copy.order for copy in self._pending.values())

    def report(self, source: AgentName, end: CopyEnd) -> None:
        """Record the end of a copy. Unknown copies, and those of other nodes, are ignored."""
        copy = self._pending.get(end.transfer_id)
        if copy is not None and copy.order.source.name == source:
            self._end(copy, end)

    def expire(self, live: Collection[AgentName]) -> None:
        """End the copies that are overdue, or whose source or destination is not `live`."""
        now = self._clock()
        for copy in list(self._pending.values()):
            silent = [name for name in (copy.order.source.name, copy.order.destination.name) if name not in live]
            if silent:
                self._fail(copy, "unreachable", f"{silent[0]} is silent")
            elif now >= copy.deadline:
                self._fail(copy, "deadline", "the agent did not report in time")

    def _fail(self, copy: _PendingCopy, outcome: CopyOutcome, message: str) -> None:
        self._end(copy, CopyEnd(copy.command.transfer_id, outcome, message))

    def _end(self, copy: _PendingCopy, end: CopyEnd) -> None:
        order = copy.order
        del self._pending[end.transfer_id], self._by_identity[_identity(order)]
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
        if not copy.ended.done():
            copy.ended.set_result(end)


def _identity(order: CopyOrder) -> _CopyIdentity:
    """Return a key that is equal for orders of the same copy."""
    prefix, destination = order.prefix, order.destination
    return prefix.model, prefix.end_hash, order.source.name, destination.name, destination.epoch
