"""One scheduling cycle as llm-d runs it: decode first, then the decider, then prefill where that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prfaas.scheduler.endpoint_picker.parameters import PrefixDecider
from prfaas.scheduler.endpoint_picker.plugins import Endpoint, Filter, PickRequest, Scorer

Rules = Literal["seed", "current"]  # of v1alpha1 under inference.networking.x-k8s.io, and under llm-d.ai
PickReason = Literal[
    "disaggregated",
    "always",
    "suffix_cached",
    "prompt_short",
    "disabled",
    "no_cache_information",
    "no_decider",
    "no_prefill_endpoint",
    "no_decode_endpoint",
]


@dataclass(frozen=True)
class SchedulingProfile:
    """Filters in order, scorers with their weights, and how many of the best are named."""

    name: str
    filters: tuple[tuple[Filter, Any], ...] = ()
    scorers: tuple[tuple[Scorer, Any, float], ...] = ()
    max_endpoints: int = 1

    def scores(self, endpoints: Sequence[Endpoint], request: PickRequest) -> list[float]:
        """Return the weighted sum of all scores, each held to [0, 1] first."""
        sums = [0.0] * len(endpoints)
        for scorer, parameters, weight in self.scorers:
            for position, score in enumerate(scorer(endpoints, request, parameters)):
                sums[position] += weight * min(1.0, max(0.0, score))
        return sums

    def run(self, endpoints: Sequence[Endpoint], request: PickRequest) -> list[Endpoint]:
        """Return the best endpoints, best first; none when the filters leave none. Equal scores keep the given order."""
        left = list(endpoints)
        for keep, parameters in self.filters:
            left = keep(left, request, parameters)
        return max_score(left, self.scores(left, request), self.max_endpoints)


def max_score(endpoints: Sequence[Endpoint], scores: Sequence[float], num: int) -> list[Endpoint]:
    """Return the `num` endpoints of the highest scores, highest first."""
    order = sorted(range(len(endpoints)), key=lambda position: -scores[position])
    return [endpoints[position] for position in order[:num]]


@dataclass(frozen=True)
class Decider:
    """Whether a request is prefilled apart; without `prefix` it always is."""

    rules: Rules
    prefix: PrefixDecider | None = None

    def disaggregates(self, decode: Endpoint | None, request: PickRequest) -> tuple[bool, PickReason]:
        """Return the decision for a request whose decode endpoint is chosen.

        Seed rules: suffix > nonCachedTokens, 0 means always. Current ones: suffix ≥ nonCachedTokens, 0 means never, and
        an endpoint of which nobody knows what it has cached keeps the request.
        """
        if decode is None:
            return False, "no_decode_endpoint"
        if self.prefix is None:
            return True, "always"
        limit = self.prefix.nonCachedTokens
        if limit == 0:
            return (True, "always") if self.rules == "seed" else (False, "disabled")
        if request.num_tokens < self.prefix.promptTokens:
            return False, "prompt_short"
        if self.rules == "current" and decode.num_matched_blocks is None:
            return False, "no_cache_information"
        suffix = request.num_tokens - request.cached_tokens(decode)
        splits = suffix > limit if self.rules == "seed" else suffix >= limit
        return (True, "disaggregated") if splits else (False, "suffix_cached")


@dataclass(frozen=True)
class EndpointPicker:
    """A configuration that has been read (`config.py`)."""

    profiles: Mapping[str, SchedulingProfile]
    decode_profile: str
    prefill_profile: str | None  # None: nothing is ever split
    decider: Decider | None
    warnings: tuple[str, ...] = ()

    def pick_decode(self, endpoints: Sequence[Endpoint], request: PickRequest) -> list[Endpoint]:
        """Return the first stage: who may decode, best first."""
        return self.profiles[self.decode_profile].run(endpoints, request)

    def pick_prefill(
        self, endpoints: Sequence[Endpoint], request: PickRequest, decode: Endpoint
    ) -> tuple[Endpoint | None, PickReason]:
        """Return the other stages, for the decode endpoint that was chosen: who prefills in its place, if anybody, and why."""
        if self.decider is None or self.prefill_profile is None:
            return None, "no_decider"
        splits, reason = self.decider.disaggregates(decode, request)
        if not splits:
            return None, reason
        prefill = self.profiles[self.prefill_profile].run(endpoints, request)
        return (prefill[0], reason) if prefill else (None, "no_prefill_endpoint")
