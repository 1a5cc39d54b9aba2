"""What a plan is made for: clusters with their instances, the links between them, and the service-level objectives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prfaas.model.cost.profile import Profile
from prfaas.model.kv.geometry import Geometry


@dataclass(frozen=True)
class PrfaasCluster:
    """A cluster that only prefills, for others."""

    name: str
    profile: Profile
    num_instances: int
    egress_bytes_per_second: float = math.inf  # over all its links together
    price_per_hour: float | None = None  # of one instance


@dataclass(frozen=True)
class PdCluster:
    """A cluster that prefills and decodes.

    `num_prefill` fixes N_p; None leaves it to the solver. `shared_instances` may do both at once, as RAPID-Serve's do:
    such an instance gives shares a, b ≤ 1 of itself to prefill and decode with a + b ≤ 1 + `overlap`. With at least
    one of them N_p need not be whole. `intra_bytes_per_second` is what one prefill instance can send to the decode
    nodes beside it; None assumes, as equation (4) does, that it is no limit.
    """

    name: str
    profile: Profile
    num_instances: int
    num_prefill: int | None = None
    shared_instances: int = 0
    overlap: float = 0.0
    intra_bytes_per_second: float | None = None
    price_per_hour: float | None = None

    @property
    def roles(self) -> float:
        """Return how many whole roles the instances can play: N plus what sharing gains."""
        return self.num_instances + self.overlap * self.shared_instances

    def num_decode(self, num_prefill: float) -> float:
        """Return the N_d that goes with an N_p."""
        return min(float(self.num_instances), self.roles - num_prefill)


@dataclass(frozen=True)
class ClusterPath:
    """The path from a PrfaaS cluster to a PD cluster."""

    source: str
    target: str
    bytes_per_second: float


@dataclass(frozen=True)
class Objectives:
    """The service-level objectives; None asks for nothing."""

    decode_tokens_per_second: float = 40.0
    ttft_seconds: float | None = None
    ttft_quantile: float = 0.9


@dataclass(frozen=True)
class Deployment:
    """Clusters that serve one model. Without `links` every PrfaaS cluster reaches every PD cluster."""

    name: str
    model: Geometry
    prfaas: tuple[PrfaasCluster, ...]
    pd: tuple[PdCluster, ...]
    links: tuple[ClusterPath, ...] = ()
    objectives: Objectives = Objectives()

    def link_bytes_per_second(self, source: str, target: str) -> float:
        """What one link carries: infinite when no links are listed (the egress limits then), 0 between unlinked clusters."""
        if not self.links:
            return math.inf
        return sum(link.bytes_per_second for link in self.links if (link.source, link.target) == (source, target))

    def egress(self, cluster: PrfaasCluster) -> float:
        """B_out of one PrfaaS cluster, bytes per second."""
        linked = sum(self.link_bytes_per_second(cluster.name, pd.name) for pd in self.pd)
        return min(cluster.egress_bytes_per_second, linked)

    @property
    def clusters(self) -> tuple[PrfaasCluster | PdCluster, ...]:
        """Return all of them, PrfaaS clusters first."""
        return (*self.prfaas, *self.pd)

    @property
    def price_per_hour(self) -> float | None:
        """Of all instances together; None unless every cluster has a price."""
        prices = [(cluster.price_per_hour, cluster.num_instances) for cluster in self.clusters]
        if any(price is None for price, _ in prices):
            return None
        return sum(price * count for price, count in prices if price is not None)
