"""The CANCELs of a link until the peer has heard them (pure): what the kernel took of a connection that dies may not arrive."""

from __future__ import annotations

import itertools
from typing import NamedTuple

MAX_CANCELS = 4096  # that wait for a connection, and for an answer; of more the oldest transfers end by their deadline


class _Cancel(NamedTuple):
    frame: bytes
    deadline: float  # of the transfer, when the peer gives it up by itself


class Cancels:
    """A CANCEL is said once, and again when a connection is lost before the peer has answered it."""

    def __init__(self) -> None:
        self.unsaid: dict[bytes, _Cancel] = {}  # by transfer, in order
        self._unanswered: dict[bytes, _Cancel] = {}

    @property
    def is_any(self) -> bool:
        """Whether there is one that the peer may not have heard."""
        return bool(self.unsaid or self._unanswered)

    def put(self, transfer_id: bytes, frame: bytes, *, deadline: float) -> None:
        """The peer is to hear this of a transfer."""
        _keep(self.unsaid, transfer_id, _Cancel(frame, deadline))

    def next_frame(self) -> tuple[bytes, bytes]:
        """The first that is unsaid, after its transfer, for a connection to say it."""
        transfer_id = next(iter(self.unsaid))
        cancel = self.unsaid.pop(transfer_id)
        _keep(self._unanswered, transfer_id, cancel)
        return transfer_id, cancel.frame

    def answered(self, transfer_id: bytes) -> None:
        """The peer has said how this transfer ended."""
        self._unanswered.pop(transfer_id, None)

    def connection_lost(self) -> None:
        """Any that was said may have been lost with it."""
        unheard = self._unanswered | self.unsaid
        self.unsaid = dict(itertools.islice(unheard.items(), max(0, len(unheard) - MAX_CANCELS), None))
        self._unanswered = {}

    def expire(self, now: float) -> None:
        """Of transfers whose deadline has passed nothing need be said."""
        for cancels in (self.unsaid, self._unanswered):
            for transfer_id in [its for its, cancel in cancels.items() if now >= cancel.deadline]:
                del cancels[transfer_id]


def _keep(cancels: dict[bytes, _Cancel], transfer_id: bytes, cancel: _Cancel) -> None:
    cancels[transfer_id] = cancel
    if len(cancels) > MAX_CANCELS:
        del cancels[next(iter(cancels))]
