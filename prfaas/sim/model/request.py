"""Simulated request: its sizes, and the times of its stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from prfaas.sim.kernel.meter import StepLog
from prfaas.types import BlockHash

NEVER = math.nan


class SimulatedRequest:
    """Simulated request. Times are seconds since the start of the run; NaN means not reached.

    `num_cached_tokens` is the usable prefix that the traffic states. With simulated prefix caches, `blocks` are the
    prompt's blocks and `blocks_after` those cached after its answer. `session` groups the turns of a conversation,
    `turn` counts from 1. `num_known_tokens` is the prefix that the index reported for the prefill node,
    `num_found_tokens` the prefix found there. `decoded` has the steps of each batch that gave it tokens after another
    token, `stalls` the gaps after preemptions. `admitted` is the moment at which a waiting conversation was admitted.
    """

    __slots__ = (
        "admitted",
        "arrival",
        "blocks",
        "blocks_after",
        "decode_end",
        "decode_start",
        "decoded",
        "first_token",
        "index",
        "num_cached_tokens",
        "num_found_tokens",
        "num_known_tokens",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_retries",
        "prefill_end",
        "prefill_start",
        "reason",
        "session",
        "stalls",
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
        self.arrival = self.admitted = arrival
        self.num_prompt_tokens = prompt_tokens
        self.num_output_tokens = output_tokens
        self.num_cached_tokens = cached_tokens
        self.session = session
        self.turn = turn
        self.blocks = blocks
        self.blocks_after = blocks_after or blocks
        self.num_known_tokens = self.num_found_tokens = cached_tokens
        self.decoded: list[tuple[StepLog, int, int]] = []
        self.stalls: list[float] = []
        self.num_retries = self.num_preemptions = 0
        self.reason = ""
        self.prefill_start = self.prefill_end = self.transfer_end = NEVER
        self.decode_start = self.first_token = self.decode_end = NEVER

    def again(self) -> SimulatedRequest:
        """Return the same request, with nothing done for it yet."""
        fresh = SimulatedRequest(
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
        fresh.admitted = self.admitted
        fresh.num_retries, fresh.num_preemptions = self.num_retries + 1, self.num_preemptions
        return fresh

    @property
    def num_uncached_tokens(self) -> int:
        """Return the prompt minus the prefix that the traffic states."""
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def ttft(self) -> float:
        """Return seconds from arrival to the first token."""
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        """Return seconds per further token; 0 where there is none."""
        further = self.num_output_tokens - 1
        return (self.decode_end - self.first_token) / further if further > 0 else 0.0

    def gap_quantile(self, ratio: float) -> float:
        """Return a quantile of the gaps between its tokens; the TPOT if steps are not simulated or it has no gap."""
        parts = [log.between(first, last) for log, first, last in self.decoded if last > first]
        if not parts and not self.stalls:
            return self.tpot
        seconds = np.concatenate([*(gaps for gaps, _ in parts), np.array(self.stalls)])
        weights = np.concatenate([*(count for _, count in parts), np.ones(len(self.stalls))])
        order = np.argsort(seconds, kind="stable")
        reached = np.cumsum(weights[order])
        return float(seconds[order][np.searchsorted(reached, ratio * reached[-1])])

    @property
    def served_seconds(self) -> float:
        """Return seconds from its admission to the last token."""
        return self.decode_end - self.admitted

    @property
    def end_to_end(self) -> float:
        """Return seconds from arrival to the last token."""
        return self.decode_end - self.arrival
