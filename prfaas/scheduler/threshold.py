"""PrfaaS's rule: where a prompt is prefilled, given t, what each cluster has cached, and whether the link has room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Site = Literal[
    "pd",  # the PD cluster prefills it
    "prfaas",  # the PrfaaS cluster does
    "prfaas_holds",  # the PD cluster would, but for the longer prefix that only the PrfaaS cluster holds
]


def prefill_site(
    *, total_tokens: int, pd_cached_tokens: int, prfaas_cached_tokens: int, threshold_tokens: int, abundant: bool
) -> Site:
    """Return where a prompt is prefilled: PrfaaS, section 3.4.2.

    Scarce bandwidth: each cluster's cache counts on its own, so l_total − l_pd ≤ t stays. Abundant: the best cache of
    both counts, l_total − max(l_prfaas, l_pd) ≤ t stays. In the second case the paper fetches a prefix that only the
    other cluster holds; it is named apart, since whoever has the prefix may as well compute the short rest before all
    of it travels.
    """
    best = max(pd_cached_tokens, prfaas_cached_tokens) if abundant else pd_cached_tokens
    if total_tokens - best > threshold_tokens:
        return "prfaas"
    return "pd" if total_tokens - pd_cached_tokens <= threshold_tokens else "prfaas_holds"


@dataclass(frozen=True)
class PathCost:
    """What a transfer and a local prefill of l tokens take.

    S_kv(l) = kv_constant_bytes + kv_bytes_per_token · l; T_prefill(l) = prefill_constant_seconds +
    prefill_seconds_per_token · l + prefill_seconds_per_square_token · l², of one instance of the PD cluster.
    """

    bytes_per_second: float  # that a further transfer would get
    kv_constant_bytes: float
    kv_bytes_per_token: float
    prefill_constant_seconds: float
    prefill_seconds_per_token: float
    prefill_seconds_per_square_token: float = 0.0

    def transfer_seconds(self, num_tokens: int) -> float:
        """Return how long the KV of that many tokens is on the wire; infinite on a link without bandwidth."""
        num_bytes = self.kv_constant_bytes + self.kv_bytes_per_token * num_tokens
        return num_bytes / self.bytes_per_second if self.bytes_per_second > 0 else float("inf")

    def prefill_seconds(self, num_tokens: int) -> float:
        """Return how long the PD cluster itself computes that many tokens."""
        per_token = self.prefill_seconds_per_token + self.prefill_seconds_per_square_token * num_tokens
        return self.prefill_constant_seconds + per_token * num_tokens

    def pays(self, num_tokens: int) -> bool:
        """Return whether the link brings the KV of so many uncached tokens sooner than computing them here would."""
        return self.transfer_seconds(num_tokens) <= self.prefill_seconds(num_tokens)


@dataclass(frozen=True)
class Supply:
    """What the PrfaaS side makes and the link takes, both in requests of the mean offloaded length per second.

    `link_requests_per_second` is B_out / S_kv(l_long), `prefill_requests_per_second` is N_prfaas / T_prefill(l_long).
    """

    link_requests_per_second: float
    prefill_requests_per_second: float


HEADROOM_RATIO = 0.2  # the link counts as abundant only when it could take this much more than prefill makes
HYSTERESIS_RATIO = 0.1  # and stays so until the headroom is this much smaller: rates measured each second waver by less


def is_abundant(supply: Supply, *, was_abundant: bool) -> bool:
    """Return whether prefill, not the link, is what limits offloading: PrfaaS, section 3.4.2, with headroom and hysteresis."""
    headroom = HEADROOM_RATIO - (HYSTERESIS_RATIO if was_abundant else 0.0)
    return supply.link_requests_per_second > supply.prefill_requests_per_second * (1 + headroom)
