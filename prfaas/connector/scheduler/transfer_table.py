"""Table of an engine's transfers, which are found by request or by transfer id."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from prfaas.agent.engine.protocol import Message
from prfaas.connector.counts import Counts
from prfaas.connector.metadata import Outcome
from prfaas.types import TransferId


@dataclass(eq=False)
class RequestTransfer:
    """Transfer of one request."""

    request_id: str
    transfer_id: TransferId


Entry = TypeVar("Entry", bound=RequestTransfer)


class TransferTable(Generic[Entry]):
    """Transfers of one kind, of which a request has at most one at a time.

    Subclasses handle the events of a kind. Callers pass the time; messages to the agent go through `post`.
    """

    def __init__(self, *, post: Callable[[Message], None], counts: Counts) -> None:
        self._post = post
        self._counts = counts
        self._by_request: dict[str, Entry] = {}
        self._by_transfer: dict[TransferId, Entry] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over a copy: entries may be removed meanwhile."""
        return iter(list(self._by_request.values()))

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._by_transfer

    def of_request(self, request_id: str) -> Entry | None:
        return self._by_request.get(request_id)

    def of_transfer(self, transfer_id: TransferId) -> Entry | None:
        return self._by_transfer.get(transfer_id)

    def _add(self, entry: Entry) -> None:
        self._by_request[entry.request_id] = entry
        self._by_transfer[entry.transfer_id] = entry

    def _remove(self, entry: Entry) -> None:
        del self._by_request[entry.request_id]
        del self._by_transfer[entry.transfer_id]

    def _end(self, entry: Entry, outcome: Outcome) -> None:
        """Remove, count and log an entry; implemented by each kind."""
        raise NotImplementedError

    def fail_all(self, reason: Outcome) -> None:
        """Give up all transfers."""
        for entry in self:
            self._end(entry, reason)
