"""Scheduling cycle of llm-d: the decode stage, then the decider, then the prefill stage if the decider asks for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prfaas.scheduler.endpoint_picker.parameters import PrefixDecider
from prfaas.scheduler.endpoint_picker.plugins import Endpoint, Filter, Scorer

PickReason = Literal[
    "pd",
    "suffix_uncached",
    "suffix_cached",
    "prompt_short",
    "pd_disabled",
    "no_cache_information",
    "no_pd_prefill_instance",
]


@dataclass(frozen=True)
class SchedulingProfile:
    """Filters in order, scorers with their weights, and the number of best endpoints to name."""

    name: str
    filters: tuple[tuple[Filter, Any], ...] = ()
    scorers: tuple[tuple[Scorer, Any, float], ...] = ()
    max_endpoints: int = 1

    def scores(self, endpoints: Sequence[Endpoint], num_tokens: int) -> list[float]:
        """Return the weighted sums of all scores, each clamped to [0, 1] first."""
        sums = [0.0] * len(endpoints)
        for scorer, parameters, weight in self.scorers:
            for position, score in enumerate(scorer(endpoints, num_tokens, parameters)):
                sums[position] += weight * min(1.0, max(0.0, score))
        return sums

    def run(self, endpoints: Sequence[Endpoint], num_tokens: int) -> list[Endpoint]:
        """Return the best endpoints, best first, or none if the filters leave none. Equal scores keep their order."""
        left = list(endpoints)
        for keep, parameters in self.filters:
            left = keep(left, num_tokens, parameters)
        return max_score(left, self.scores(left, num_tokens), self.max_endpoints)


def max_score(endpoints: Sequence[Endpoint], scores: Sequence[float], num: int) -> list[Endpoint]:
    """Return the `num` endpoints with the highest scores, highest first."""
    order = sorted(range(len(endpoints)), key=lambda position: -scores[position])
    return [endpoints[position] for position in order[:num]]


@dataclass(frozen=True)
class Decider:
    """Rule for separate prefill. Without `prefix` every request is prefilled separately."""

    prefix: PrefixDecider | None = None

    def disaggregates(self, decode: Endpoint, num_tokens: int) -> tuple[bool, PickReason]:
        """Return whether the request is prefilled separately, and the reason.

        It is if suffix ≥ nonCachedTokens, where 0 means never. An endpoint with an unknown cache keeps the request.
        """
        if self.prefix is None:
            return True, "pd"
        limit = self.prefix.nonCachedTokens
        if limit == 0:
            return False, "pd_disabled"
        if num_tokens < self.prefix.promptTokens:
            return False, "prompt_short"
        if decode.num_cached_tokens is None:
            return False, "no_cache_information"
        suffix = num_tokens - decode.num_cached_tokens
        return (True, "suffix_uncached") if suffix >= limit else (False, "suffix_cached")


@dataclass(frozen=True)
class EndpointPicker:
    """Picker of one configuration file (`config.py`). Without a prefill profile nothing is prefilled separately."""

    profiles: Mapping[str, SchedulingProfile]
    decode_profile: str
    prefill_profile: str | None
    decider: Decider | None
    warnings: tuple[str, ...] = ()

    def pick_decode(self, endpoints: Sequence[Endpoint], num_tokens: int) -> list[Endpoint]:
        """Return the endpoints that may decode, best first."""
        return self.profiles[self.decode_profile].run(endpoints, num_tokens)

    def pick_prefill(
        self, endpoints: Sequence[Endpoint], num_tokens: int, decode: Endpoint
    ) -> tuple[Endpoint | None, PickReason]:
        """Return the endpoint that prefills in place of the chosen decode endpoint, or None, and the reason."""
        if self.decider is None or self.prefill_profile is None:
            return None, "pd_disabled"
        splits, reason = self.decider.disaggregates(decode, num_tokens)
        if not splits:
            return None, reason
        prefill = self.profiles[self.prefill_profile].run(endpoints, num_tokens)
        return (prefill[0], reason) if prefill else (None, "no_pd_prefill_instance")
