"""When one of a link's connections should look for a higher rate at once (pure). BBR only: others follow losses.

On long links only: nearby, eight round trips are over in a moment, and a search disturbs more than it finds.

Two reasons. Room: BBR keeps a rate that the link once refused and tries a quarter more every eighth round trip, so that a
link that has widened threefold over 40 ms is filled after two seconds; but a full link's queue shows in the round trips, and
bytes that wait at our end while these are as short as can be say that there is room. A turn: BBR nearly stops for 0.2 s
after ten seconds without a shorter round trip, all connections of a link at the same time; a search before that begins the
ten seconds anew. The turns are spread over the connections, so that the link notices little of each. Where round trips are
long compared with the shortest there is no turn: the link is full, and a search would lengthen its queue; or the way itself
has become longer, which BBR should measure.
"""

from __future__ import annotations

from prfaas.transport.congestion.connection_count import LONG_RTT_SECONDS
from prfaas.transport.congestion.rate_estimator import LinkSample

PATIENCE_SECONDS = 0.15  # of samples that all say that there is room
NO_QUEUE_RATIO, NO_QUEUE_RISE_SECONDS = 1.15, 0.001  # up to which a round trip counts as without a queue
TURN_SECONDS = 8.0  # from one turn of a connection to its next
LITTLE_QUEUE_RATIO = 1.5  # up to which a search adds no wait that anybody would notice
MIN_CONNECTIONS = 4  # of which one can be spared


class RateSearch:
    """Takes the link meter's samples."""

    def __init__(self) -> None:
        self._room_since: float | None = None
        self._turn_at: float | None = None

    def is_due(self, sample: LinkSample, *, num_connections: int) -> bool:
        """Whether one connection, the next in order, should search now."""
        if sample.min_rtt_seconds < LONG_RTT_SECONDS:
            return False
        has_room, is_turn = self._has_room(sample), self._is_turn(sample, num_connections)
        if has_room or is_turn:
            self._turn_at = sample.at
        return has_room or is_turn

    def _has_room(self, sample: LinkSample) -> bool:
        limit = NO_QUEUE_RATIO * sample.min_rtt_seconds + NO_QUEUE_RISE_SECONDS
        if not sample.queued_bytes or sample.rtt_seconds > limit:
            self._room_since = None
        elif self._room_since is None:
            self._room_since = sample.at
        elif sample.at - self._room_since >= PATIENCE_SECONDS:
            self._room_since = sample.at
            return True
        return False

    def _is_turn(self, sample: LinkSample, num_connections: int) -> bool:
        if self._turn_at is None:
            self._turn_at = sample.at
        has_queue = sample.rtt_seconds > LITTLE_QUEUE_RATIO * sample.min_rtt_seconds + NO_QUEUE_RISE_SECONDS
        if has_queue or not sample.unacknowledged_bytes or num_connections < MIN_CONNECTIONS:
            return False
        return sample.at - self._turn_at >= TURN_SECONDS / num_connections
