"""Traffic described in one line: "lognormal:mu=9.9,sigma=1,min=128,max=128Ki,output=1024"."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from prfaas import config
from prfaas.config import setting
from prfaas.errors import ConfigError
from prfaas.model.cost.lengths import Empirical, Lengths, LogNormal, Mixture
from prfaas.model.cost.workload import LaterTurns, OutputTokens, Workload, with_context
from prfaas.solve.files.quantities import NUMBER
from prfaas.units import parse_ratio

DEFAULT = "lognormal"


@dataclass(frozen=True)
class LogNormalSpec:
    """A truncated log-normal; the defaults are the paper's case study."""

    mu: float = setting(NUMBER, default=9.90, doc="Mean of ln(prompt tokens).")
    sigma: float = setting(NUMBER, default=1.00, minimum=1e-3, doc="Standard deviation of ln(prompt tokens).")
    min: int = setting("tokens", default=128, minimum=1, doc="Shortest prompt.")
    max: int = setting("tokens", default=131_072, doc="Longest prompt.")
    output: int = setting("tokens", default=1024, minimum=1, doc="Mean number of output tokens.")
    output_cv: float = setting(NUMBER, default=0.0, doc="Standard deviation of the output tokens over their mean.")
    hits: str = setting(
        "text", default="", doc='Prefix hits, "40%:50%/20%:90%": 40 % find half of their prompt cached.'
    )
    later: float = setting("ratio", default=0.0, maximum=0.999, doc="Share of requests that continue a conversation.")
    later_new: int = setting("tokens", default=512, minimum=1, doc="New tokens of a later turn.")
    later_cached: int = setting("tokens", default=20_000, doc="Tokens before them that were cached.")
    interference: float = setting("ratio", default=1.0, doc="Share of an append's time that decode loses beside it.")

    def __post_init__(self) -> None:
        if self.min >= self.max:
            raise ValueError("min must be below max")


def parse_spec(spec: str) -> Workload:
    """Return the workload of a one-line description.

    Raises:
        ConfigError: an unknown kind, key or unit.
    """
    kind, _, rest = spec.partition(":")
    if kind.strip() != "lognormal":
        raise ConfigError(f"trace {spec!r}: neither a file nor lognormal[:key=value,...]")
    pairs = [item.partition("=") for item in rest.split(",") if item.strip()]
    values = {key.strip(): value.strip() for key, _, value in pairs}
    parsed = config.load_mapping(LogNormalSpec, values, where=f"trace {spec!r}")
    lengths = _prompts(parsed, spec)
    output = with_context(OutputTokens(parsed.output, parsed.output_cv**2), _all_prompts(lengths, parsed))
    later = None
    if parsed.later:
        turns = Empirical([parsed.later_new], [parsed.later_cached])
        later = LaterTurns(parsed.later, turns, interference=parsed.interference)
    return Workload(spec, lengths, output, later)


def _all_prompts(lengths: Lengths, parsed: LogNormalSpec) -> Lengths:
    turns = Empirical([parsed.later_new], [parsed.later_cached])
    return Mixture(((1 - parsed.later, lengths), (parsed.later, turns))) if parsed.later else lengths


def _prompts(parsed: LogNormalSpec, spec: str) -> LogNormal | Mixture:
    """Uncached tokens: a request with a hit of h has (1 − h) of its prompt left and h / (1 − h) times that cached."""
    whole = LogNormal(parsed.mu, parsed.sigma, float(parsed.min), float(parsed.max))
    if whole.kept_mass < 1e-6:
        raise ConfigError(f"trace {spec!r}: almost no prompt falls between min and max")
    hits = _hits(parsed.hits, spec)
    missed = 1.0 - sum(share for share, _ in hits)
    if not hits:
        return whole
    parts: list[tuple[float, Lengths]] = [(missed, whole)] if missed > 1e-12 else []
    for share, ratio in hits:
        left = 1.0 - ratio
        shifted = replace(whole, mu=whole.mu + math.log(left), low=whole.low * left, high=whole.high * left)
        parts.append((share, replace(shifted, cached_ratio=ratio / left)))
    return Mixture(tuple(parts))


def _hits(text: str, spec: str) -> list[tuple[float, float]]:
    hits = []
    for item in filter(None, text.split("/")):
        share, _, ratio = item.partition(":")
        try:
            hits.append((parse_ratio(share), parse_ratio(ratio)))
        except ValueError as error:
            raise ConfigError(f'trace {spec!r}: hits: {item!r}: {error}; write "40%:50%/20%:90%"') from error
    if sum(share for share, _ in hits) > 1 + 1e-12 or any(ratio >= 1 for _, ratio in hits):
        raise ConfigError(f"trace {spec!r}: hits: shares add up to 100% at most, and no hit is the whole prompt")
    return hits
