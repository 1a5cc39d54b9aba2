"""Where each conversation's KV lies: which node answered its last turn."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from prfaas.types import AgentName

MAX_SESSIONS = 200_000  # about 60 MB; the longest unused goes first


@dataclass(frozen=True)
class Session:
    """The last turn of a conversation."""

    agent: AgentName
    num_prompt_tokens: int


class Sessions:
    """Conversations that are not yet idle for `expiry_seconds`. Times are seconds on a clock that only goes forward."""

    def __init__(self, expiry_seconds: float, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._expiry_seconds = expiry_seconds
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[tuple[str, str], tuple[float, Session]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def put(self, tenant: str, name: str, *, session: Session, now: float) -> None:
        self._sessions[tenant, name] = (now, session)
        self._sessions.move_to_end((tenant, name))
        while len(self._sessions) > self._max_sessions or self._oldest() <= now - self._expiry_seconds:
            self._sessions.popitem(last=False)

    def _oldest(self) -> float:
        return next(iter(self._sessions.values()))[0]

    def get(self, tenant: str, name: str, *, now: float) -> Session | None:
        """The session, unless it is unknown or idle for too long."""
        found = self._sessions.get((tenant, name)) if name else None
        return found[1] if found and found[0] > now - self._expiry_seconds else None
