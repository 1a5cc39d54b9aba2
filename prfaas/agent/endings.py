"""How transfers to this node have ended: what an OPEN or a claim that comes late hears."""

from __future__ import annotations

from dataclasses import replace

from prfaas.grants import Grant
from prfaas.transport.answers import shortened
from prfaas.transport.messages import Ending
from prfaas.transport.remembered import Remembered
from prfaas.types import TransferId

MAX_REMEMBERED = 1 << 16  # ended transfers whose grants have not expired, about 400 bytes each
MAX_CANCELLED = 1 << 12  # transfers that were cancelled before their grants came here, about 400 bytes each


class Endings:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._ended: dict[TransferId, tuple[float, Ending]] = {}  # until when it is remembered
        self._cancelled: Remembered[Ending] = Remembered(MAX_CANCELLED)

    def of(self, grant: Grant) -> Ending | None:
        """How its transfer has ended already, or why its sender gave it up before it came."""
        _, ending = self._ended.get(grant.transfer_id, (0.0, None))
        return ending or self._cancelled.get(grant.source, grant.transfer_id)

    def put(self, transfer_id: TransferId, ending: Ending, *, until: float) -> None:
        """A transfer has ended, whose grant is good until then."""
        self._ended[transfer_id] = until, _shortened(ending)

    def cancelled(self, peer: str, transfer_id: TransferId, ending: Ending) -> None:
        """A peer gives up a transfer that nobody here knows: it counts where the grant says that this peer sends it."""
        self._cancelled.put(peer, transfer_id, _shortened(ending))

    def expire(self, now: float) -> None:
        """Forget what no grant asks for any more, and the oldest beyond what is kept."""
        while self._ended:
            oldest = next(iter(self._ended))
            if self._ended[oldest][0] >= now and len(self._ended) <= MAX_REMEMBERED:
                return
            del self._ended[oldest]


def _shortened(ending: Ending) -> Ending:
    """What it says may be a peer's words."""
    return replace(ending, message=shortened(ending.message))
