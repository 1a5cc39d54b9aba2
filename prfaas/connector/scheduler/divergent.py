"""Requests for which the engine's own cache holds attention beyond its states, and the loadable prefix ends before. Pure.

vLLM counts such attention as computed, and takes from a connector only what reaches beyond it. If nothing does, vLLM falls
back to the prefix that all its groups hold. It does not ask what the connector has beyond that prefix, such as a
checkpoint inside the prompt. So the connector has vLLM ask again, with the prefix that all groups hold.
"""

from __future__ import annotations

from collections.abc import Callable


class DivergentHits:
    """Requests of one engine that vLLM must look up by the prefix that all its groups hold."""

    def __init__(self, *, is_supported: bool) -> None:
        """Create an empty set. `is_supported` means that a load completes all that the engine's groups lack."""
        self._is_supported = is_supported
        self._awaited: set[str] = set()

    @property
    def are_allowed(self) -> bool:
        """True if the engine may count attention beyond its states."""
        return self._is_supported and not self._awaited

    def asks_again(
        self, request_id: str, offered_tokens: int | None, *, local_tokens: int, agreed_tokens: Callable[[], int]
    ) -> bool:
        """Return whether the engine must ask for this request again.

        After it has, its answer is accepted, so that no request waits for ever. `offered_tokens` is the length that the
        agent can serve, or None if unknown. `agreed_tokens()` is the prefix that all groups of the engine hold.
        """
        if request_id in self._awaited:
            self._awaited.discard(request_id)
            return False
        reaches_beyond = offered_tokens is None or offered_tokens > local_tokens
        if not self._is_supported or reaches_beyond or agreed_tokens() >= local_tokens:
            return False
        self._awaited.add(request_id)
        return True

    def forget(self, request_id: str) -> None:
        """Drop a request that waits for its KV, or has ended."""
        self._awaited.discard(request_id)
