"""Requests whose attention the engine holds itself beyond its states, and for which what can be loaded ends before that (pure).

vLLM counts such attention as computed and takes from a connector only what reaches beyond it. Where nothing does it goes
back to what all its groups hold, without asking what the connector has beyond that: a checkpoint inside the prompt, or a
transfer of exactly the tokens whose attention is there. Such a request is asked for again, by what all groups hold.
"""

from __future__ import annotations

from collections.abc import Callable


class DivergentHits:
    """All such requests of one engine."""

    def __init__(self, are_completed: bool) -> None:
        """`are_completed`: whether all that the engine's groups lack of such a prompt is loaded."""
        self._are_completed = are_completed
        self._awaited: set[str] = set()  # requests to be looked up by what all groups hold

    @property
    def are_allowed(self) -> bool:
        """Whether the engine may count attention that it holds beyond its states."""
        return self._are_completed and not self._awaited

    def asks_again(
        self, request_id: str, offered_tokens: int | None, *, local_tokens: int, agreed_tokens: Callable[[], int]
    ) -> bool:
        """Whether the engine is to ask for this request once more, by what all groups hold, `agreed_tokens()`.

        When it has, its word is taken: nobody waits for an engine that asks in one way only. `offered_tokens`: up to where the
        agent can serve the prompt, if that is known.
        """
        if request_id in self._awaited:
            self._awaited.discard(request_id)
            return False
        is_beyond = offered_tokens is None or offered_tokens > local_tokens
        if not self._are_completed or is_beyond or agreed_tokens() >= local_tokens:
            return False
        self._awaited.add(request_id)
        return True

    def forget(self, request_id: str) -> None:
        """The request waits or has ended."""
        self._awaited.discard(request_id)
