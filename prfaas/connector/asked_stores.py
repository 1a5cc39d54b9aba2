"""Blocks for which the agent was asked for slots of its pool, until it has answered or been waited for long enough."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prfaas.agent.protocol import Cancel, Message, SendOpened, Store, TransferFailed
from prfaas.connector.outcomes import Outcome
from prfaas.types import GroupBlocks, TransferId


@dataclass(eq=False, kw_only=True)
class AskedStore:
    """What one request leaves of its first `num_tokens` tokens. Answered: `opened` or `failed` is there."""

    request_id: str
    num_tokens: int
    ask_until: float  # monotonic seconds
    opened: SendOpened | None = None
    failed: Outcome | None = None


Its = TypeVar("Its", bound=AskedStore)


class AskedStores(Generic[Its]):
    """Those without an answer that was acted on. No clock: takes `now`."""

    def __init__(self, post: Callable[[Message], None]) -> None:
        self._post = post
        self._by_transfer: dict[TransferId, Its] = {}

    def __len__(self) -> int:
        return len(self._by_transfer)

    def ask(self, its: Its, groups: Sequence[GroupBlocks]) -> None:
        transfer_id = TransferId(os.urandom(16))
        self._by_transfer[transfer_id] = its
        self._post(Store(transfer_id, its.num_tokens, tuple(groups)))

    def on_message(self, message: SendOpened | TransferFailed) -> None:
        its = self._by_transfer.get(message.transfer_id)
        if its is None:
            return
        if isinstance(message, SendOpened):
            its.opened = message
        else:
            its.failed = message.reason

    def take_answered(self, *, now: float) -> list[Its]:
        """Those that have slots, and those that will have none, which have `failed`."""
        answered = [
            (its, name) for name, its in self._by_transfer.items() if its.opened or its.failed or now >= its.ask_until
        ]
        for its, transfer_id in answered:
            del self._by_transfer[transfer_id]
            if its.opened is None or its.failed is not None:
                its.failed = its.failed or "agent_slow"
                self._post(Cancel(transfer_id))
        return [its for its, _ in answered]

    def fail_all(self, reason: Outcome) -> None:
        """The agent is gone, or the engine wants none of it; the blocks are released with the next step."""
        for its in self._by_transfer.values():
            its.failed = its.failed or reason
