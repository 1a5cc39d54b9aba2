"""How much each peer has of what is bounded over all of them (pure)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Generic, TypeVar

from prfaas.errors import RemoteProtocolError
from prfaas.transport.ranges import Area, Slab
from prfaas.transport.receiver.api import OpenRequest
from prfaas.transport.receiver.assembler import MAX_FRAGMENTS
from prfaas.transport.sender.outbound_transfer import MAX_CANCELS


class FairQuota:
    """A bounded good. Its last quarter is for peers that have less than a quarter, so that none takes it from the others."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._total = 0
        self._of: Counter[str] = Counter()

    def has_room(self, peer: str, amount: int = 1) -> bool:
        """Whether a peer may have so much more."""
        total, own = self._total + amount, self._of[peer] + amount
        return total <= self.limit and (total <= self.limit * 3 // 4 or own <= self.limit // 4)

    def change(self, peer: str, amount: int) -> None:
        """A peer has so much more, or less."""
        self._total += amount
        self._of[peer] += amount
        if not self._of[peer]:
            del self._of[peer]


T = TypeVar("T")


class EndedTransfers(Generic[T]):
    """The latest answers, by peer and transfer: beyond the limit whoever has most loses its oldest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._of: dict[str, OrderedDict[bytes, T]] = {}

    def get(self, peer: str, transfer_id: bytes) -> T | None:
        its = self._of.get(peer)
        return None if its is None else its.get(transfer_id)

    def put(self, peer: str, transfer_id: bytes, answer: T) -> None:
        its = self._of.setdefault(peer, OrderedDict())
        self._count += transfer_id not in its
        its[transfer_id] = answer
        if self._count > self._limit:
            self._forget_one()

    def _forget_one(self) -> None:
        most = max(self._of, key=lambda peer: len(self._of[peer]))
        self._of[most].popitem(last=False)
        self._count -= 1
        if not self._of[most]:
            del self._of[most]


# Bounds over all peers, of which the last quarter is for those that have little.
MAX_TRANSFERS = 1024  # asked and arriving
MAX_OPENING_BYTES = 256 << 20  # of all of them: what their senders said when they opened them
RUN_BYTES = 200  # that a run of sizes takes
MAX_PIECES = 1 << 18  # of what has arrived of all transfers, about 300 bytes each
FAIR_PIECES = MAX_PIECES // MAX_TRANSFERS  # of one, which any may have; an honest sender's are a few per connection
MAX_STRAYS = 4 * MAX_CANCELS  # of transfers that were never opened, in STRAYS_SECONDS: the caller hears of each
STRAYS_SECONDS = 1.0


class Admission:
    """Of one receiving end. No lock of its own: `arrivals.Arrivals` holds its lock around every call, of `Pieces` too."""

    def __init__(self, *, max_pieces: int = MAX_PIECES) -> None:
        self._transfers, self._opening_bytes, self._pieces = map(
            FairQuota, (MAX_TRANSFERS, MAX_OPENING_BYTES, max_pieces)
        )
        self._strays, self._strays_until = FairQuota(MAX_STRAYS), 0.0  # monotonic seconds

    def objection(self, request: OpenRequest) -> str:
        """Why there is no room for a transfer; "": there is."""
        if not self._transfers.has_room(request.peer_name):
            return f"too many of {MAX_TRANSFERS} transfers are arriving already"
        if not self._opening_bytes.has_room(request.peer_name, _opening_bytes(request)):
            return "what opens transfers takes too much memory already"
        return ""

    def admit(self, request: OpenRequest) -> FragmentQuota:
        """A transfer is here from now on; returns what it may be kept in."""
        self._transfers.change(request.peer_name, 1)
        self._opening_bytes.change(request.peer_name, _opening_bytes(request))
        return FragmentQuota(request.peer_name, self._pieces)

    def dismiss(self, request: OpenRequest, pieces: FragmentQuota) -> None:
        """Nothing is kept of it any more."""
        self._transfers.change(request.peer_name, -1)
        self._opening_bytes.change(request.peer_name, -_opening_bytes(request))
        pieces.give_back()

    def stray(self, peer: str) -> None:
        """A peer gives up a transfer that was never opened.

        Raises:
            RemoteProtocolError: it gives up more of those than any sender keeps.
        """
        if not self._strays.has_room(peer):
            raise RemoteProtocolError("cancels", "too many transfers are cancelled that were never opened")
        self._strays.change(peer, 1)

    def forget_strays(self, now: float) -> None:
        """Once in STRAYS_SECONDS; `now` is monotonic seconds."""
        if now >= self._strays_until:
            self._strays, self._strays_until = FairQuota(MAX_STRAYS), now + STRAYS_SECONDS


class FragmentQuota:
    """Of one transfer, disjoint, that what has arrived of it is kept as."""

    def __init__(self, peer: str, shared: FairQuota) -> None:
        self.count = 0
        self._peer, self._shared = peer, shared
        self._is_given_back = False

    def has_room(self, arrived: Area, slab: Slab) -> bool:
        """Whether what has arrived may be kept in as many pieces more as this slab makes it."""
        more = arrived.growth(slab)
        count = self.count + more
        return count <= FAIR_PIECES or (count <= MAX_FRAGMENTS and self._shared.has_room(self._peer, more))

    def refusal(self) -> RemoteProtocolError:
        """What a peer has done whose chunk finds none."""
        text = f"more than {MAX_FRAGMENTS} separate pieces, or too many of {self._shared.limit} of all transfers"
        return RemoteProtocolError("fragments", text)

    def recount(self, arrived: Area) -> None:
        """Something has arrived, or is lost; of a transfer that nothing is kept of it does not matter."""
        if arrived.num_fragments != self.count and not self._is_given_back:
            self._shared.change(self._peer, arrived.num_fragments - self.count)
            self.count = arrived.num_fragments

    def give_back(self) -> None:
        """Nothing is kept of the transfer any more."""
        self._shared.change(self._peer, -self.count)
        self.count, self._is_given_back = 0, True


def _opening_bytes(request: OpenRequest) -> int:
    return len(request.open_body) + RUN_BYTES * len(request.object_bytes.runs)
