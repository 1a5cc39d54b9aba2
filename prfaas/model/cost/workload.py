"""The traffic to plan for: input lengths, output lengths, and how much of it is later turns of conversations."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.model.cost.curve import ONE, CachedTokens
from prfaas.model.cost.lengths import Lengths, Mixture, expectation, mean_tokens


@dataclass(frozen=True)
class OutputTokens:
    """The number of output tokens of a request.

    `mean_context_tokens` is what a decoding request holds on average over its time: prompt and half its output,
    weighted by how long it decodes.
    """

    mean: float
    squared_cv: float = 0.0  # variance over squared mean
    mean_context_tokens: float = 0.0


@dataclass(frozen=True)
class LaterTurns:
    """The requests that continue a conversation whose KV its decode node may still hold.

    `ratio` of all requests are such turns; `local_ratio` (x) of these are prefilled on the decode nodes. While a decode
    node appends, its decode slows down so that `interference` of the append's time is lost to it.
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
    """Requests per second have no place here: a workload is what one average request is like.

    `lengths` are those of first turns, or of all requests when `later` is None.
    """

    name: str
    lengths: Lengths
    output: OutputTokens
    later: LaterTurns | None = None
    inferred: tuple[str, ...] = ()

    @property
    def prefilled(self) -> Lengths:
        """Return the requests that go through a prefill station; weighs 1 minus what is appended on decode nodes."""
        if self.later is None:
            return self.lengths
        first = (1.0 - self.later.ratio, self.lengths)
        later = (self.later.ratio * (1.0 - self.later.local_ratio), self.later.lengths)
        return Mixture(tuple((weight, lengths) for weight, lengths in (first, later) if weight > 0))

    @property
    def appended_ratio(self) -> float:
        """x of the paper's extension to conversations, as a share of all requests; 0 is the paper itself."""
        return 0.0 if self.later is None else self.later.appended_ratio


def with_context(output: OutputTokens, lengths: Lengths) -> OutputTokens:
    """`output` with the context of requests whose output does not depend on their prompt."""
    prompt = mean_tokens(lengths) + expectation(lengths, CachedTokens()) / expectation(lengths, ONE)
    return OutputTokens(output.mean, output.squared_cv, prompt + half_output_tokens(output))


def half_output_tokens(output: OutputTokens) -> float:
    """What a decoding request holds of its own output on average over its time: E[out²] / (2 E[out])."""
    return 0.5 * output.mean * (1.0 + output.squared_cv)
