"""Plan of a deployment: the threshold, each cluster's split, and the throughput."""

from dataclasses import dataclass
from typing import Literal

Limit = Literal["prfaas", "link", "pd-prefill", "pd-decode"]


@dataclass(frozen=True)
class Split:
    """N_p and N_d of one PD cluster; whole numbers unless instances are shared."""

    cluster: str
    num_prefill: float
    num_decode: float


@dataclass(frozen=True)
class PlannedRoute:
    """Route of requests with `above_tokens` < uncached tokens ≤ `up_to_tokens`, as a share of all requests.

    They decode in one cluster. `source` prefills them, or the decode cluster if it is None. Requests of a tenant have
    the `clusters` that may see them; those of no such tenant have none.
    """

    clusters: frozenset[str]
    above_tokens: int
    up_to_tokens: int
    decode: str
    source: str | None
    share: float


@dataclass(frozen=True)
class Plan:
    """Operating point; throughputs in requests per second, None where the deployment has no such stage.

    `remote_shares` and `local_shares` are each cluster's part of the offloaded and of the local requests. `routes` are
    empty if the threshold alone decides. Otherwise the threshold is for requests that must follow a cached prefix.
    """

    name: str
    threshold_tokens: int | None
    splits: tuple[Split, ...]
    offload_ratio: float
    local_ratio: float
    mean_offloaded_tokens: float | None
    prfaas_throughput: float | None
    pd_prefill_throughput: float | None
    pd_decode_throughput: float
    system_throughput: float
    egress_bytes_per_second: float | None
    local_bytes_per_second: float
    limit: Limit
    remote_shares: tuple[float, ...]
    local_shares: tuple[float, ...]
    routes: tuple[PlannedRoute, ...] = ()

    @property
    def num_prefill(self) -> float:
        """Return N_p over all PD clusters."""
        return sum(split.num_prefill for split in self.splits)

    @property
    def num_decode(self) -> float:
        """Return N_d over all PD clusters."""
        return sum(split.num_decode for split in self.splits)
