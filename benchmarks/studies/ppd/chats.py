"""Conversations as long as those of a data set: turns, new tokens and answers drawn one by one, not as their means.

The lengths are those of the 500 ShareGPT and 500 WildChat conversations that PPD's authors ran, as far as their published
latencies (github.com/freelulul/vllm-ppd, Apache-2.0) show them:

- answers: P50, P90 and P99 of end to end minus TTFT over TPOT, four replicas at 2 conversations a second, where nobody
  waits; the ends are set so that the mean is the tokens of a turn that they print (309 and 274);
- new tokens of a prompt: P90 and P99 of the first turns' TTFT in the same runs, by what a prompt token costs there
  (`PpdModel`); below a hundred tokens a TTFT tells nothing, so that the median is assumed;
- turns: their mean (4.408 and 4.112) is printed, their spread is assumed: two, and geometrically many more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from prfaas.sim.workload.conversations import Turn

_MAX_TURNS = 32


@dataclass(frozen=True)
class Lengths:
    """A distribution of tokens by some of its quantiles; between two of them its logarithm is straight."""

    ratios: tuple[float, ...]
    tokens: tuple[float, ...]

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """So many, each at least 1."""
        logarithms = np.interp(generator.uniform(size=count), self.ratios, np.log(self.tokens))
        return [max(1, round(value)) for value in np.exp(logarithms).tolist()]


@dataclass(frozen=True)
class DataSet:
    """Data set of conversations: mean number of turns, and the lengths of new prompts and answers."""

    mean_turns: float
    new: Lengths
    answer: Lengths

    def draw(self, count: int, *, seed: int) -> list[list[Turn]]:
        """So many conversations of two turns or more."""
        generator = np.random.default_rng(seed)
        # Probability that a conversation ends after a turn, except the first.
        ends = 1.0 / (self.mean_turns - 1.0)
        turns = np.minimum(1 + generator.geometric(ends, count), _MAX_TURNS).tolist()
        return [
            [
                Turn(new, output)
                for new, output in zip(self.new.draw(generator, num), self.answer.draw(generator, num), strict=True)
            ]
            for num in turns
        ]


_RATIOS = (0.0, 0.5, 0.9, 0.99, 1.0)
DATA_SETS: Mapping[str, DataSet] = MappingProxyType({
    "ShareGPT-like": DataSet(
        4.408, Lengths(_RATIOS, (4, 56, 400, 2000, 4000)), Lengths(_RATIOS, (45, 283, 605, 913, 1024))
    ),
    "WildChat-like": DataSet(
        4.112, Lengths(_RATIOS, (4, 36, 260, 1250, 3000)), Lengths(_RATIOS, (18, 180, 652, 1201, 1400))
    ),
})  # fmt: skip
