"""What llm-d's plugins see of an endpoint and of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ROLE_LABEL = "llm-d.ai/role"


@dataclass(frozen=True)
class Endpoint:
    """One model server. None stands for figures that nobody has measured."""

    name: str  # namespace/name, as session tokens carry it
    labels: Mapping[str, str] = field(default_factory=dict)
    num_waiting: int = 0
    num_running: int = 0
    kv_usage_ratio: float = 0.0
    num_matched_blocks: int | None = None  # of this request's prompt
    num_in_flight: int | None = None  # requests that the picker sent there and that have not ended
    num_in_flight_tokens: int | None = None
    last_cold_use: float | None = None  # when it last took a request that nobody had cached; only the order counts
    # What nobody measures here, as `config.py` warns; llm-d's own cases state it:
    predicted_ttft_seconds: float | None = None
    active_adapters: frozenset[str] = frozenset()
    waiting_adapters: frozenset[str] = frozenset()
    max_adapters: int = 0


@dataclass(frozen=True)
class PickRequest:
    """What of a request the plugins read."""

    num_tokens: int = 0
    block_tokens: int = 1  # of the blocks that `num_matched_blocks` counts
    adapter: str = ""
    session_token: str | None = None  # x-session-token: base64 of an endpoint's name

    @property
    def num_blocks(self) -> int:
        """Return the prompt's full blocks."""
        return self.num_tokens // self.block_tokens

    def cached_tokens(self, endpoint: Endpoint) -> int:
        """What of the prompt an endpoint holds; nothing where that is not known."""
        return (endpoint.num_matched_blocks or 0) * self.block_tokens
