"""Log of an agent's batches: numbered, kept until acknowledged, and sent again after a break.

Sans-I/O: takes the inventory's announcements and returns messages. If a break cannot be resumed, everything is
announced again.
"""

from collections import deque
from collections.abc import Iterable

from prfaas.index.inventory import Change, Inventory
from prfaas.index.segments import Announcement
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import batch_message, digest_messages

ANNOUNCEMENTS_PER_BATCH = 256  # At most 150 KB of full segments.
MAX_UNACKNOWLEDGED = 1024  # Bound of kept batches; older ones are announced again if needed.
MAX_UNTAKEN = 64 * ANNOUNCEMENTS_PER_BATCH  # Beyond this, announcing everything is cheaper.
_MAX_UNGATHERED = 4096  # Blocks; applying so many takes 4 to 20 ms.


class EventLog:
    """Everything that the manager has not acknowledged, on top of the inventory."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.sequence = 0  # Number of the last batch.
        self.acknowledged = 0
        self.num_full_announcements = 0
        self._events: list[Change] = []
        self._num_gathered = 0  # Blocks in `_events`.
        self._fresh: list[Announcement] = []
        self._is_overrun = False  # Too many changes were waiting, so only the inventory is complete.
        self._kept: deque[pb.Batch] = deque(maxlen=MAX_UNACKNOWLEDGED)
        self._outbox: deque[pb.Batch] = deque()

    def publish(self, events: Iterable[Change]) -> bool:
        """Add changes of the pool, and return whether there is something to send.

        Beyond `MAX_UNTAKEN` announcements that nobody takes, everything is announced again.

        Raises:
            IndexRefusal: an event's layout is unknown.
        """
        for event in events:
            self.inventory.check(event)
            self._events.append(event)
            self._num_gathered += event.num_blocks
            if self._num_gathered >= _MAX_UNGATHERED:
                self._gather()
        return bool(self._events or self._fresh or self._is_overrun)

    def _gather(self) -> None:
        """Apply the published changes together, so that single blocks are announced by the cell."""
        self._fresh += self.inventory.apply(self._events)
        self._events.clear()
        self._num_gathered = 0
        if len(self._fresh) > MAX_UNTAKEN:
            self._fresh, self._is_overrun = [], True

    def resume(self, after: int) -> None:
        """Send the batches after `after` again, or everything if they are no longer kept."""
        self._outbox.clear()
        missing = [batch for batch in self._kept if batch.sequence > after]
        if after == self.sequence or (missing and missing[0].sequence == after + 1):
            self._outbox.extend(missing)
        else:
            self.announce_everything()

    def announce_everything(self) -> None:
        """Replace the waiting changes by the full inventory. The first batch has a reset."""
        self.num_full_announcements += 1
        self._gather()
        self._fresh, self._kept, self._is_overrun = [], deque(maxlen=MAX_UNACKNOWLEDGED), False
        self._outbox.clear()
        everything = self.inventory.everything()
        self._batch(everything[:ANNOUNCEMENTS_PER_BATCH], reset=True)
        for start in range(ANNOUNCEMENTS_PER_BATCH, len(everything), ANNOUNCEMENTS_PER_BATCH):
            self._batch(everything[start : start + ANNOUNCEMENTS_PER_BATCH])

    def _batch(self, announcements: list[Announcement], *, reset: bool = False) -> None:
        self.sequence += 1
        batch = batch_message(self.sequence, announcements, reset=reset)
        self._kept.append(batch)
        self._outbox.append(batch)

    def take(self) -> list[pb.ReportEventsRequest]:
        """Return the messages that are due, in order."""
        self._gather()
        if self._is_overrun:
            self.announce_everything()
        for start in range(0, len(self._fresh), ANNOUNCEMENTS_PER_BATCH):
            self._batch(self._fresh[start : start + ANNOUNCEMENTS_PER_BATCH])
        self._fresh = []
        due = [pb.ReportEventsRequest(batch=batch) for batch in self._outbox]
        self._outbox.clear()
        return due

    def digests(self) -> pb.ReportEventsRequest:
        """Return the digests of everything that `take` has returned. Send them only if nothing fresh is waiting."""
        assert not self._fresh and not self._events, "digests describe what has been announced"
        return pb.ReportEventsRequest(digests=pb.Digests(holdings=digest_messages(self.inventory.digests())))

    def acknowledge(self, sequence: int) -> None:
        self.acknowledged = max(self.acknowledged, sequence)
        while self._kept and self._kept[0].sequence <= sequence:
            self._kept.popleft()
