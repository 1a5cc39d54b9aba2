"""The connections that a link has, which lead to one process of its peer."""

from __future__ import annotations

from collections.abc import Iterator, Set

from prfaas.transport.line import Line
from prfaas.transport.stalls import StallWatch


class Lines:
    """No threads and no locks of its own: `sender.Link` holds its lock around every call. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self.process: bytes | None = None  # names the one that has answered last
        self.generation = 0  # its number among those that have answered: of lines of another nothing counts any more
        self._lines: set[Line] = set()
        self._stalls: StallWatch[Line] = StallWatch()

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines)

    def __contains__(self, line: object) -> bool:
        return line in self._lines

    def add(self, line: Line) -> None:
        """A connection is made."""
        self._lines.add(line)

    def remove(self, line: Line) -> None:
        """It is gone."""
        self._lines.discard(line)

    def lead_to(self, process: bytes) -> bool:
        """This process of the peer answers; returns whether that is new. Connections to an earlier one are dead, and end."""
        if process == self.process:
            return False
        self.process = process
        self.generation += 1
        self.abort()
        return True

    def abort(self) -> None:
        """End every connection."""
        for line in self._lines:
            line.abort()

    def abort_readers(self, transfers: Set[bytes]) -> None:
        """End those that are sending from the memory of any of these."""
        for line in self._lines:
            if line.reads in transfers:
                line.abort()

    # What the link's watch asks

    @property
    def in_flight_bytes(self) -> int:
        """Sent and not acknowledged."""
        return sum(line.in_flight_bytes for line in self._lines)

    @property
    def rtt_seconds(self) -> float:
        """The longest that the kernel had seen when it was asked last; 0: it has not been."""
        return max((line.seen.rtt_seconds for line in self._lines if line.seen), default=0.0)

    def is_any_slow(self, now: float) -> bool:
        """Whether bytes still move on one that has lasted: its peer is not out of reach."""
        return any(line.pulse.is_slow(now) for line in self._lines)

    def leaving(self, now: float) -> set[bytes]:
        """The transfers of control frames that the peer is still taking."""
        return {said for line in self._lines if (said := line.leaving(now)) is not None}

    def stalled(self, now: float) -> tuple[list[Line], list[Line]]:
        """Those that stand still while others are answered, and those that a PING is to tell of. To be asked often."""
        pulses = {line: line.look(now) for line in self._lines if line.is_alive}
        verdict = self._stalls.look(pulses, now=now)
        return verdict.stalled, list(pulses) if verdict.wants_pings else []
