"""Simulated request: its sizes, and the times of its stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import numpy as np

from prfaas.model.cost.curve import FloatArray
from prfaas.sim.kernel.meter import StepLog
from prfaas.types import BlockHash

NEVER = math.nan


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """Simulated request. Times are seconds since the start of the run; NaN means not reached.

    `num_cached_tokens` is the usable prefix that the traffic states. With simulated prefix caches, `blocks` are the
    prompt's blocks and `blocks_after` those cached after its answer. `session` groups the turns of a conversation,
    `turn` counts from 1. `num_found_tokens` is the prefix that the prefill node really held. `decoded` has the steps of
    each batch that gave it tokens after another token, `stalls` the gaps after preemptions.
    """

    index: int
    arrival: float
    _: KW_ONLY
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    session: int = -1
    turn: int = 1
    blocks: Sequence[BlockHash] = ()
    blocks_after: Sequence[BlockHash] = ()
    num_retries: int = 0
    num_preemptions: int = 0
    num_found_tokens: int = field(init=False)
    reason: str = field(default="", init=False)
    decoded: list[tuple[StepLog, int, int]] = field(default_factory=list, init=False)
    stalls: list[float] = field(default_factory=list, init=False)
    prefill_start: float = field(default=NEVER, init=False)
    prefill_end: float = field(default=NEVER, init=False)
    transfer_end: float = field(default=NEVER, init=False)
    decode_start: float = field(default=NEVER, init=False)
    first_token: float = field(default=NEVER, init=False)
    decode_end: float = field(default=NEVER, init=False)

    def __post_init__(self) -> None:
        self.blocks_after = self.blocks_after or self.blocks
        self.num_found_tokens = self.num_cached_tokens

    def again(self) -> SimulatedRequest:
        """Return the same request to be sent again, with no stage reached."""
        return replace(self, num_retries=self.num_retries + 1)

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

    @property
    def gaps(self) -> tuple[FloatArray, FloatArray]:
        """Return the gaps between its tokens in seconds, and the number of tokens after each such gap.

        All gaps equal the TPOT if steps are not simulated.
        """
        parts = [log.between(first, last) for log, first, last in self.decoded if last > first]
        if not parts and not self.stalls:
            return np.array([self.tpot]), np.array([self.num_output_tokens - 1.0])
        seconds = np.concatenate([*(gaps for gaps, _ in parts), np.array(self.stalls)])
        return seconds, np.concatenate([*(count for _, count in parts), np.ones(len(self.stalls))])

    def gap_quantile(self, ratio: float) -> float:
        """Return a quantile of the gaps between its tokens; 0 if there is none."""
        seconds, num_tokens = self.gaps
        order = np.argsort(seconds, kind="stable")
        reached = np.cumsum(num_tokens[order])
        return float(seconds[order][np.searchsorted(reached, ratio * reached[-1])])

    @property
    def end_to_end(self) -> float:
        """Return seconds from arrival to the last token."""
        return self.decode_end - self.arrival
