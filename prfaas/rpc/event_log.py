"""The agent's outgoing batches: numbered, kept until they are acknowledged, sent again after a break.

Sans-io: the inventory's announcements in, messages out. What cannot be resumed is announced anew as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from prfaas.index.inventory import Change, Inventory
from prfaas.index.segments import Announcement
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import batch_message, digest_messages

ANNOUNCEMENTS_PER_BATCH = 256  # 150 KB of full segments
MAX_UNACKNOWLEDGED = 1024  # batches; what falls out is announced anew should it be needed
MAX_UNTAKEN = 64 * ANNOUNCEMENTS_PER_BATCH  # announcements; with more than these it is cheaper to announce everything
_MAX_UNGATHERED = 4096  # blocks; to apply so many takes 4 to 20 ms


class EventLog:
    """Everything that the manager has not yet acknowledged, on top of the inventory."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.sequence = 0  # of the last batch that was made
        self.acknowledged = 0
        self.num_full_announcements = 0
        self._events: list[Change] = []
        self._num_gathered = 0  # blocks in these
        self._fresh: list[Announcement] = []
        self._is_overrun = False  # too much came while nobody took it: the inventory alone knows it all
        self._kept: deque[pb.Batch] = deque(maxlen=MAX_UNACKNOWLEDGED)
        self._outbox: deque[pb.Batch] = deque()

    def publish(self, events: Iterable[Change]) -> bool:
        """Take changes of the pool; True when there is something to send. While nobody takes it, no more than
        `MAX_UNTAKEN` announcements are kept: then everything is announced anew.

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
        """Apply what was published: blocks that came one by one are announced by the cell."""
        self._fresh += self.inventory.apply(self._events)
        self._events.clear()
        self._num_gathered = 0
        if len(self._fresh) > MAX_UNTAKEN:
            self._fresh, self._is_overrun = [], True

    def resume(self, after: int) -> None:
        """The manager knows batches up to `after`: send the rest again, or everything when the rest is not at hand."""
        self._outbox.clear()
        missing = [batch for batch in self._kept if batch.sequence > after]
        if after == self.sequence or (missing and missing[0].sequence == after + 1):
            self._outbox.extend(missing)
        else:
            self.announce_everything()

    def announce_everything(self) -> None:
        """Replace whatever is waiting by the whole inventory, the first batch with a reset."""
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
        """The messages that are due, in order."""
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
        """What the node holds after all that `take` has returned; only to be sent when nothing fresh is waiting."""
        assert not self._fresh and not self._events, "digests describe what has been announced"
        return pb.ReportEventsRequest(digests=pb.Digests(holdings=digest_messages(self.inventory.digests())))

    def acknowledge(self, sequence: int) -> None:
        self.acknowledged = max(self.acknowledged, sequence)
        while self._kept and self._kept[0].sequence <= sequence:
            self._kept.popleft()
