"""PrfaaS's rule for the site of a prefill: the threshold t, the caches of both clusters, and the room on the path."""

from dataclasses import dataclass
from typing import Literal

# `prfaas_holds`: the PD cluster would prefill, but only the PrfaaS cluster holds the longer prefix.
PrefillSite = Literal["pd", "prfaas", "prfaas_holds"]
HEADROOM_RATIO = 0.2  # A path counts as abundant if it could take this much more than prefill produces.
HYSTERESIS_RATIO = 0.1  # An abundant path may lose this much headroom. Rates measured every second vary by less.


def prefill_site(
    *, total_tokens: int, pd_cached_tokens: int, prfaas_cached_tokens: int, threshold_tokens: int, abundant: bool
) -> PrefillSite:
    """Return the site that prefills a prompt: PrfaaS, section 3.4.2.

    With scarce bandwidth each cluster's cache counts on its own: a prompt with l_total − l_pd ≤ t stays.
    With abundant bandwidth the better cache counts: a prompt with l_total − max(l_prfaas, l_pd) ≤ t stays.
    In the second case the paper fetches a prefix that only the PrfaaS cluster holds. This site has its own name, because
    the cluster with the prefix may as well compute the short rest.
    """
    best = max(pd_cached_tokens, prfaas_cached_tokens) if abundant else pd_cached_tokens
    if total_tokens - best > threshold_tokens:
        return "prfaas"
    return "pd" if total_tokens - pd_cached_tokens <= threshold_tokens else "prfaas_holds"


@dataclass(frozen=True)
class PathCost:
    """Duration of a transfer and of a local prefill of l tokens.

    S_kv(l) = kv_constant_bytes + kv_bytes_per_token · l.
    T_prefill(l) = prefill_constant_seconds + prefill_seconds_per_token · l + prefill_seconds_per_square_token · l²,
    for one instance of the PD cluster. `bytes_per_second` is the rate that a further transfer would get.
    """

    bytes_per_second: float
    kv_constant_bytes: float
    kv_bytes_per_token: float
    prefill_constant_seconds: float
    prefill_seconds_per_token: float
    prefill_seconds_per_square_token: float = 0.0

    def transfer_seconds(self, num_tokens: int) -> float:
        """Return the transfer time of the KV of `num_tokens` tokens; infinite on a path without bandwidth."""
        num_bytes = self.kv_constant_bytes + self.kv_bytes_per_token * num_tokens
        return num_bytes / self.bytes_per_second if self.bytes_per_second > 0 else float("inf")

    def prefill_seconds(self, num_tokens: int) -> float:
        """Return the time in which the PD cluster itself computes `num_tokens` tokens."""
        per_token = self.prefill_seconds_per_token + self.prefill_seconds_per_square_token * num_tokens
        return self.prefill_constant_seconds + per_token * num_tokens

    def pays(self, num_tokens: int) -> bool:
        """Return whether a transfer of `num_tokens` uncached tokens takes no longer than computing them locally."""
        return self.transfer_seconds(num_tokens) <= self.prefill_seconds(num_tokens)


@dataclass(frozen=True)
class Supply:
    """Capacity of the PrfaaS cluster and of the path, both in requests of the mean offloaded length per second.

    `link_requests_per_second` is B_out / S_kv(l_long). `prefill_requests_per_second` is N_prfaas / T_prefill(l_long).
    """

    link_requests_per_second: float
    prefill_requests_per_second: float


def is_abundant(supply: Supply, *, was_abundant: bool) -> bool:
    """Return whether prefill, not the path, limits offloading: PrfaaS, section 3.4.2, with headroom and hysteresis."""
    headroom = HEADROOM_RATIO - (HYSTERESIS_RATIO if was_abundant else 0.0)
    return supply.link_requests_per_second > supply.prefill_requests_per_second * (1 + headroom)
