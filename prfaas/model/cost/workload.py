"""Traffic to plan for: input lengths and output lengths."""

from dataclasses import dataclass

from prfaas.model.cost.curve import cached_tokens
from prfaas.model.cost.lengths import Lengths, expectation, mean_tokens


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
class Workload:
    """Properties of an average request; the arrival rate is not part of it."""

    name: str
    lengths: Lengths
    output: OutputTokens
    inferred: tuple[str, ...] = ()


def with_context(output: OutputTokens, lengths: Lengths) -> OutputTokens:
    """Return `output` with the mean context of requests whose output does not depend on their prompt."""
    prompt = mean_tokens(lengths) + expectation(lengths, cached_tokens)
    # A decoding request holds E[out²] / (2 E[out]) output tokens on average.
    return OutputTokens(output.mean, output.squared_cv, prompt + 0.5 * output.mean * (1.0 + output.squared_cv))
