"""Conversations and the node that answered each one's last turn."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prfaas.types import AgentName

SESSION_SECONDS = 3600.0  # An idle session is forgotten after so long.
MAX_SESSIONS = 200_000  # About 60 MB; the least recently used goes first.


@dataclass(frozen=True)
class Session:
    """Last turn of a conversation."""

    agent: AgentName
    num_prompt_tokens: int


class Sessions:
    """Conversations that are idle for less than `expiry_seconds`. Times are monotonic seconds."""

    def __init__(self, expiry_seconds: float, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._expiry_seconds = expiry_seconds
        self._max_sessions = max_sessions
        # Least recently used first.
        self._sessions: OrderedDict[tuple[str, str], tuple[float, Session]] = OrderedDict()
        self._counts: Counter[AgentName] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def put(self, tenant: str, name: str, *, session: Session, now: float) -> None:
        if (tenant, name) in self._sessions:
            self._drop((tenant, name))
        self._sessions[tenant, name] = (now, session)
        self._counts[session.agent] += 1
        self.expire(now)

    def expire(self, now: float) -> None:
        """Drop sessions that are idle for too long, and the oldest beyond the limit."""
        while self._sessions:
            oldest, (at, _) = next(iter(self._sessions.items()))
            if len(self._sessions) <= self._max_sessions and at > now - self._expiry_seconds:
                return
            self._drop(oldest)

    def _drop(self, key: tuple[str, str]) -> None:
        _, session = self._sessions.pop(key)
        self._counts[session.agent] -= 1
        if not self._counts[session.agent]:
            del self._counts[session.agent]

    def by_agent(self) -> Mapping[AgentName, int]:
        """Return the number of conversations whose last turn each node answered."""
        return dict(self._counts)

    def latest(self, now: float) -> Iterator[tuple[str, str, Session, float]]:
        """Yield (tenant, name, session, seconds since its last turn), most recent first."""
        for (tenant, name), (at, session) in reversed(self._sessions.items()):
            yield tenant, name, session, now - at

    def get(self, tenant: str, name: str, *, now: float) -> Session | None:
        """Return the session, or None if it is unknown or idle for too long."""
        entry = self._sessions.get((tenant, name)) if name else None
        return entry[1] if entry and entry[0] > now - self._expiry_seconds else None
