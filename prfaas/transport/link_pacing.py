"""How fast a link sends at most, alone and together with others, and how large its chunks are for it."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable

from prfaas import logs
from prfaas.transport.chunker import ChunkSize
from prfaas.transport.line import Line
from prfaas.transport.link_config import LinkConfig
from prfaas.transport.outbox import Outbox
from prfaas.transport.rate_budget import Use

_log = logs.get("transport")
PACE_STEP_RATIO = 0.02  # smaller changes of a share are not told to the kernel
MUCH = 4  # times as large, or as small: a change of the chunk size that the log has


class LinkPacing:
    """No threads and no locks of its own: `sender.Link` holds its lock around every call."""

    def __init__(self, config: LinkConfig, *, peer_name: str) -> None:
        self._limit, self._budgets = config.max_bytes_per_second, config.budgets
        self._shares: list[float] = []  # of the budgets; 0: none
        self._told = 0.0  # by the peer, of what all that send to it share; 0: nothing
        self._peer_name = peer_name
        self._pace = self._limit  # of all connections together; 0: none is told, infinity: none any more
        self._chunks: ChunkSize | None = None  # what there is to log of how large they are
        self._logged_chunk_bytes = 0

    def divide(self, lines: Collection[Line]) -> None:
        """Have the kernel send an equal part over each of the link's connections."""
        for line in lines if self._pace else ():
            line.pace(self._pace / len(lines))

    def follow_budgets(self, link: Hashable, use: Use, lines: Collection[Line], *, now: float) -> None:
        """Send no faster than the link's share of what it sends from together with others."""
        self._shares = [budget.share(link, use, now=now) for budget in self._budgets]
        self._choose(lines)

    def told(self, bytes_per_second: float, lines: Collection[Line]) -> None:
        """Send no faster than the peer wants; 0: it does not say."""
        self._told = bytes_per_second
        self._choose(lines)

    def _choose(self, lines: Collection[Line]) -> None:
        none = math.inf if self._pace else 0.0
        wanted = min(filter(None, (self._limit, self._told, *self._shares)), default=none)
        if not math.isclose(wanted, self._pace, rel_tol=PACE_STEP_RATIO):
            self._pace = wanted
            self.divide(lines)

    def fit_chunks(self, outbox: Outbox, *, achievable_bytes_per_second: float, num_connections: int) -> None:
        """Have chunks no larger than what a connection carries in a while, as far as that is known."""
        known = min(achievable_bytes_per_second or math.inf, self._pace or math.inf)
        size = outbox.set_rate(known / max(1, num_connections))
        self._chunks = size if num_connections and (known < math.inf or not self._logged_chunk_bytes) else None

    def log_chunks(self) -> None:
        """Once it is known how large they are, and where that has changed much."""
        size, logged = self._chunks, self._logged_chunk_bytes
        if size is not None and not logged / MUCH < size.num_bytes < MUCH * logged:
            _log.info("link.chunks", peer=self._peer_name, bytes=size.num_bytes, reason=size.reason)
            self._logged_chunk_bytes = size.num_bytes

    def leave_budgets(self, link: Hashable) -> None:
        """The link is closed, and asks for no share any more."""
        for budget in self._budgets:
            budget.forget(link)
