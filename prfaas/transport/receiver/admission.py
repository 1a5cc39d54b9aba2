"""Quotas that divide what is bounded over all peers. Pure: callers pass the time and hold a lock."""

from collections import Counter, OrderedDict
from typing import Generic, TypeVar

from prfaas.errors import RemoteProtocolError
from prfaas.transport.protocol.messages import MAX_CANCELS
from prfaas.transport.ranges import Area, Slab
from prfaas.transport.receiver.api import OpenRequest
from prfaas.transport.receiver.assembler import MAX_FRAGMENTS

# Bounds over all peers.
MAX_TRANSFERS = 1024
MAX_OPENING_BYTES = 256 << 20  # Bytes of all OPENs, and of the object sizes that they list.
RUN_BYTES = 200  # Memory of one run of equal object sizes.
MAX_TOTAL_FRAGMENTS = 1 << 18  # About 300 bytes each.
# Fragments that every transfer may have. An honest sender causes a few per connection.
FAIR_FRAGMENTS = MAX_TOTAL_FRAGMENTS // MAX_TRANSFERS
MAX_STRAY_CANCELS = 4 * MAX_CANCELS  # Per period, since each is reported to the caller.
STRAY_PERIOD_SECONDS = 1.0

T = TypeVar("T")


class FairQuota:
    """Bound on a resource that all peers share.

    The last quarter is left to peers that hold less than a quarter, so no peer can take everything.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._total = 0
        self._by_peer: Counter[str] = Counter()

    def has_room(self, peer: str, amount: int = 1) -> bool:
        """Return whether a peer may take this amount."""
        total, held = self._total + amount, self._by_peer[peer] + amount
        return total <= self.limit and (total <= self.limit * 3 // 4 or held <= self.limit // 4)

    def change(self, peer: str, amount: int) -> None:
        """Add an amount to what a peer holds; a negative amount gives it back."""
        self._total += amount
        self._by_peer[peer] += amount
        if not self._by_peer[peer]:
            del self._by_peer[peer]


class EndedTransfers(Generic[T]):
    """Outcomes of the latest transfers by peer and id. Beyond the limit, the peer with most entries loses its oldest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._by_peer: dict[str, OrderedDict[bytes, T]] = {}

    def get(self, peer: str, transfer_id: bytes) -> T | None:
        outcomes = self._by_peer.get(peer)
        return None if outcomes is None else outcomes.get(transfer_id)

    def put(self, peer: str, transfer_id: bytes, outcome: T) -> None:
        outcomes = self._by_peer.setdefault(peer, OrderedDict())
        self._count += transfer_id not in outcomes
        outcomes[transfer_id] = outcome
        if self._count > self._limit:
            largest = max(self._by_peer, key=lambda name: len(self._by_peer[name]))
            self._by_peer[largest].popitem(last=False)
            self._count -= 1
            if not self._by_peer[largest]:
                del self._by_peer[largest]


class FragmentQuota:
    """Fragments that the arrived area of one transfer is kept as. They count towards the bound over all transfers."""

    def __init__(self, peer: str, shared: FairQuota) -> None:
        self.count = 0
        self._peer, self._shared = peer, shared
        self._is_released = False

    def has_room(self, arrived: Area, slab: Slab) -> bool:
        """Return whether the area may grow by as many fragments as this slab can add."""
        growth = arrived.growth(slab)
        count = self.count + growth
        return count <= FAIR_FRAGMENTS or (count <= MAX_FRAGMENTS and self._shared.has_room(self._peer, growth))

    def check(self, arrived: Area, slab: Slab) -> None:
        """Check that there is room for the fragments that a slab can add.

        Raises:
            RemoteProtocolError: there is none.
        """
        if not self.has_room(arrived, slab):
            text = f"more than {MAX_FRAGMENTS} fragments, or too many of {self._shared.limit} of all transfers"
            raise RemoteProtocolError("fragments", text)

    def update(self, arrived: Area) -> None:
        """Count the fragments again after the area has changed."""
        if arrived.num_fragments != self.count and not self._is_released:
            self._shared.change(self._peer, arrived.num_fragments - self.count)
            self.count = arrived.num_fragments

    def release(self) -> None:
        """Give everything back; later updates count nothing."""
        self._shared.change(self._peer, -self.count)
        self.count, self._is_released = 0, True


class Admission:
    """Bounds on the transfers of one receiver."""

    def __init__(self, *, max_fragments: int = MAX_TOTAL_FRAGMENTS) -> None:
        self._transfers, self._opening_bytes = FairQuota(MAX_TRANSFERS), FairQuota(MAX_OPENING_BYTES)
        self._fragments = FairQuota(max_fragments)
        self._stray_cancels, self._stray_period_ends_at = FairQuota(MAX_STRAY_CANCELS), 0.0

    def objection(self, request: OpenRequest) -> str:
        """Return why there is no room for a transfer, or an empty string."""
        if not self._transfers.has_room(request.peer_name):
            return f"the limit of {MAX_TRANSFERS} inbound transfers is reached"
        if not self._opening_bytes.has_room(request.peer_name, _opening_bytes(request)):
            return "opened transfers take too much memory"
        return ""

    def admit(self, request: OpenRequest) -> FragmentQuota:
        """Count a transfer and return the quota of its fragments."""
        self._transfers.change(request.peer_name, 1)
        self._opening_bytes.change(request.peer_name, _opening_bytes(request))
        return FragmentQuota(request.peer_name, self._fragments)

    def release(self, request: OpenRequest, fragments: FragmentQuota) -> None:
        """Give back all that a transfer was counted for."""
        self._transfers.change(request.peer_name, -1)
        self._opening_bytes.change(request.peer_name, -_opening_bytes(request))
        fragments.release()

    def count_stray_cancel(self, peer: str, *, now: float) -> None:
        """Count a CANCEL of a transfer that was never opened.

        Raises:
            RemoteProtocolError: the peer sends more of these than any sender keeps.
        """
        if now >= self._stray_period_ends_at:
            self._stray_cancels = FairQuota(MAX_STRAY_CANCELS)
            self._stray_period_ends_at = now + STRAY_PERIOD_SECONDS
        if not self._stray_cancels.has_room(peer):
            raise RemoteProtocolError("cancels", "too many transfers are cancelled that were never opened")
        self._stray_cancels.change(peer, 1)


def _opening_bytes(request: OpenRequest) -> int:
    return len(request.open_body) + RUN_BYTES * len(request.object_bytes.runs)
