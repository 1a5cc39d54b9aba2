"""A simulated request: what arrives, and when it was where."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prfaas.types import BlockHash

NEVER = math.nan


class Request:
    """One request on its way. Times are seconds since the start; NaN: it has not come to that.

    `num_cached_tokens` is the usable prefix as the traffic states it; `blocks` name the prompt's blocks where prefix
    caches are simulated, `blocks_after` those that are there once its answer is. `session` groups the turns of a
    conversation, `turn` counts from 1. `num_retries`: how often it was sent again.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "blocks_after",
        "decode_end",
        "decode_start",
        "first_token",
        "index",
        "num_cached_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
        "num_retries",
        "prefill_end",
        "prefill_start",
        "reason",
        "session",
        "transfer_end",
        "turn",
    )

    def __init__(
        self,
        index: int,
        arrival: float,
        *,
        prompt_tokens: int,
        output_tokens: int,
        cached_tokens: int = 0,
        session: int = -1,
        turn: int = 1,
        blocks: Sequence[BlockHash] = (),
        blocks_after: Sequence[BlockHash] = (),
    ) -> None:
        self.index = index
        self.arrival = arrival
        self.num_prompt_tokens = prompt_tokens
        self.num_output_tokens = output_tokens
        self.num_cached_tokens = cached_tokens
        self.session = session
        self.turn = turn
        self.blocks = blocks
        self.blocks_after = blocks_after or blocks
        self.num_retries = 0
        self.reason = ""
        self.prefill_start = self.prefill_end = self.transfer_end = NEVER
        self.decode_start = self.first_token = self.decode_end = NEVER

    def again(self) -> Request:
        """The same request, with nothing done for it yet."""
        fresh = Request(
            self.index,
            self.arrival,
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=self.num_output_tokens,
            cached_tokens=self.num_cached_tokens,
            session=self.session,
            turn=self.turn,
            blocks=self.blocks,
            blocks_after=self.blocks_after,
        )
        fresh.num_retries = self.num_retries + 1
        return fresh

    @property
    def num_uncached_tokens(self) -> int:
        """What a prefill without any other cache computes."""
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        """Seconds per further token; 0 where there is none."""
        further = self.num_output_tokens - 1
        return (self.decode_end - self.first_token) / further if further > 0 else 0.0

    @property
    def end_to_end(self) -> float:
        """Seconds from arrival to the last token."""
        return self.decode_end - self.arrival
