"""Liveness of the agent, by acknowledged heartbeats while the scheduler waits for anything."""

import math
import time
from collections.abc import Callable

from prfaas.agent.engine.protocol import Heartbeat, Message

# An unanswered heartbeat is not repeated. Each answer also has the progress of the engine's claims.
HEARTBEAT_SECONDS = 0.1


class AgentLiveness:
    """Heartbeats to one agent. Times are monotonic seconds."""

    def __init__(self, post: Callable[[Message], None], *, silence_seconds: float) -> None:
        """`silence_seconds` is the longest time without a message after a heartbeat."""
        self._post = post
        self._silence_seconds = silence_seconds
        self._number = 0
        self._answered_number = 0
        self._next_at = -math.inf
        # Time of the unanswered heartbeat, or of the latest message after it.
        self._unanswered_since = math.inf

    def beat(self) -> None:
        """Send a heartbeat unless one is unanswered or the latest was sent just now."""
        now = time.monotonic()
        if self._number == self._answered_number and now >= self._next_at:
            self._number += 1
            self._next_at = now + HEARTBEAT_SECONDS
            self._unanswered_since = now
            self._post(Heartbeat(self._number))

    def on_message(self) -> None:
        """Note any message of the agent."""
        self._unanswered_since = math.inf if self._number == self._answered_number else time.monotonic()

    def on_alive(self, number: int) -> None:
        """Note the answer to a heartbeat."""
        self._answered_number = number
        self.on_message()

    def restart(self) -> None:
        """Begin anew with another agent."""
        self._answered_number = self._number
        self._unanswered_since = math.inf

    @property
    def is_silent(self) -> bool:
        """True if the agent has sent nothing for too long after a heartbeat."""
        return time.monotonic() - self._unanswered_since > self._silence_seconds
