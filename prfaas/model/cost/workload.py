"""Traffic to plan for: input lengths, output lengths, and the share of later turns of conversations."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.model.cost.curve import ONE, CachedTokens
from prfaas.model.cost.lengths import Lengths, Mixture, expectation, mean_tokens


@dataclass(frozen=True)
class OutputTokens:
    """Distribution of output tokens per request; `squared_cv` is variance over squared mean.

    `mean_context_tokens` is what a decoding request holds on average: its prompt and half of its output, weighted by
    the time that it decodes.
    """

    mean: float
    squared_cv: float = 0.0
    mean_context_tokens: float = 0.0


@dataclass(frozen=True)
class LaterTurns:
    """Requests that continue a conversation whose KV a decode node may still hold.

    `ratio` of all requests are later turns; `local_ratio` (x) of these are prefilled on the decode nodes. Decode loses
    the share `interference` of the time that such a prefill takes.
    """

    ratio: float
    lengths: Lengths
    local_ratio: float = 0.0
    interference: float = 1.0

    @property
    def appended_ratio(self) -> float:
        """Return the share of all requests that is prefilled on decode nodes."""
        return self.ratio * self.local_ratio


@dataclass(frozen=True)
class Workload:
    """Properties of an average request; the arrival rate is not part of it.

    `lengths` describe first turns, or all requests if `later` is None.
    """

    name: str
    lengths: Lengths
    output: OutputTokens
    later: LaterTurns | None = None
    inferred: tuple[str, ...] = ()

    @property
    def prefilled(self) -> Lengths:
        """Return the lengths of requests that prefill instances compute; turns appended on decode nodes are left out."""
        if self.later is None:
            return self.lengths
        first = (1.0 - self.later.ratio, self.lengths)
        later = (self.later.ratio * (1.0 - self.later.local_ratio), self.later.lengths)
        return Mixture(tuple((weight, lengths) for weight, lengths in (first, later) if weight > 0))

    @property
    def appended_ratio(self) -> float:
        """Return the share of all requests that is prefilled on decode nodes; 0 in the paper."""
        return 0.0 if self.later is None else self.later.appended_ratio


def with_context(output: OutputTokens, lengths: Lengths) -> OutputTokens:
    """Return `output` with the mean context of requests whose output does not depend on their prompt."""
    prompt = mean_tokens(lengths) + expectation(lengths, CachedTokens()) / expectation(lengths, ONE)
    return OutputTokens(output.mean, output.squared_cv, prompt + half_output_tokens(output))


def half_output_tokens(output: OutputTokens) -> float:
    """Return the mean output tokens that a decoding request holds: E[out²] / (2 E[out])."""
    return 0.5 * output.mean * (1.0 + output.squared_cv)
