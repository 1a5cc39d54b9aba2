"""Table of an engine's transfers, which are found by request or by transfer id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from prfaas.types import TransferId


class RequestTransfer(Protocol):
    """Transfer of one request."""

    request_id: str

    @property
    def transfer_id(self) -> TransferId: ...


Entry = TypeVar("Entry", bound=RequestTransfer)


class TransferTable(Generic[Entry]):
    """Transfers of one kind, of which a request has at most one at a time."""

    def __init__(self) -> None:
        self._by_request: dict[str, Entry] = {}
        self._by_transfer: dict[TransferId, Entry] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over a copy: entries may be removed meanwhile."""
        return iter(list(self._by_request.values()))

    def add(self, entry: Entry) -> None:
        self._by_request[entry.request_id] = entry
        self._by_transfer[entry.transfer_id] = entry

    def remove(self, entry: Entry) -> None:
        del self._by_request[entry.request_id]
        del self._by_transfer[entry.transfer_id]

    def of_request(self, request_id: str) -> Entry | None:
        return self._by_request.get(request_id)

    def of_transfer(self, transfer_id: TransferId) -> Entry | None:
        return self._by_transfer.get(transfer_id)
