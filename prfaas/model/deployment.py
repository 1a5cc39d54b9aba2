"""Deployment that a plan is made for: clusters with their instances, paths between them, and objectives."""

import math
from dataclasses import dataclass

from prfaas.model.cost.colocation import ALTERNATING, Frontier
from prfaas.model.cost.egress_price import EgressPrice
from prfaas.model.cost.profile import Profile
from prfaas.model.kv.geometry import Geometry


@dataclass(frozen=True)
class PrfaasCluster:
    """Cluster that only prefills. Its egress is shared by all its paths.

    Price, power and kilograms of CO2 per kWh are those of one instance. The price includes power and carbon.
    """

    name: str
    profile: Profile
    num_instances: int
    egress_bytes_per_second: float = math.inf
    price_per_hour: float | None = None
    egress_price: EgressPrice | None = None
    kilowatts: float = 0.0
    carbon_per_kwh: float = 0.0


@dataclass(frozen=True)
class PdCluster:
    """Cluster that prefills and decodes; the price is of one instance, with power and carbon.

    `num_prefill` fixes N_p; None leaves it to the solver. `shared_instances` prefill and decode at once, as in
    RAPID-Serve: the speeds of both lie below `frontier`, and N_p need not be whole.
    """

    name: str
    profile: Profile
    num_instances: int
    num_prefill: int | None = None
    shared_instances: int = 0
    frontier: Frontier = ALTERNATING
    price_per_hour: float | None = None
    kilowatts: float = 0.0
    carbon_per_kwh: float = 0.0


@dataclass(frozen=True)
class ClusterPath:
    """Path from a PrfaaS cluster to a PD cluster."""

    source: str
    target: str
    bytes_per_second: float

    @property
    def name(self) -> str:
        """Return the name that plans give to the path."""
        return f"{self.source}->{self.target}"


@dataclass(frozen=True)
class TenantShare:
    """Share of the requests that only some clusters may see."""

    name: str
    ratio: float
    clusters: frozenset[str]


@dataclass(frozen=True)
class Objectives:
    """Service-level objectives; None asks for nothing."""

    decode_tokens_per_second: float = 40.0
    ttft_seconds: float | None = None
    ttft_quantile: float = 0.9


@dataclass(frozen=True)
class Deployment:
    """Clusters that serve one model. Without `paths` every PrfaaS cluster reaches every PD cluster.

    Requests of no tenant in `tenants` may use all clusters.
    """

    name: str
    model: Geometry
    prfaas: tuple[PrfaasCluster, ...]
    pd: tuple[PdCluster, ...]
    paths: tuple[ClusterPath, ...] = ()
    objectives: Objectives = Objectives()
    tenants: tuple[TenantShare, ...] = ()

    def path_bytes_per_second(self, source: str, target: str) -> float:
        """Return the rate of a path: infinite if no paths are listed, 0 if this one is not listed."""
        if not self.paths:
            return math.inf
        return sum(path.bytes_per_second for path in self.paths if (path.source, path.target) == (source, target))

    def egress(self, cluster: PrfaasCluster) -> float:
        """Return B_out of one PrfaaS cluster in bytes per second."""
        paths = sum(self.path_bytes_per_second(cluster.name, pd.name) for pd in self.pd)
        return min(cluster.egress_bytes_per_second, paths)

    @property
    def clusters(self) -> tuple[PrfaasCluster | PdCluster, ...]:
        """Return all clusters, PrfaaS clusters first."""
        return (*self.prfaas, *self.pd)

    @property
    def traffic(self) -> list[tuple[float, frozenset[str]]]:
        """Return shares of the requests, with the clusters that may see them."""
        everywhere = frozenset(cluster.name for cluster in self.clusters)
        rest = 1.0 - sum(tenant.ratio for tenant in self.tenants)
        shares = [(rest, everywhere), *((tenant.ratio, tenant.clusters) for tenant in self.tenants)]
        return [(ratio, clusters) for ratio, clusters in shares if ratio > 1e-12]

    @property
    def price_per_hour(self) -> float | None:
        """Return the price of all instances together; None unless every cluster has a price."""
        prices = [(cluster.price_per_hour, cluster.num_instances) for cluster in self.clusters]
        if any(price is None for price, _ in prices):
            return None
        return sum(price * count for price, count in prices if price is not None)

    @property
    def kilowatts(self) -> float:
        """Return the power of all instances."""
        return sum(cluster.num_instances * cluster.kilowatts for cluster in self.clusters)

    @property
    def carbon_per_hour(self) -> float:
        """Return the kilograms of CO2 that all instances cause in an hour."""
        return sum(cluster.num_instances * cluster.kilowatts * cluster.carbon_per_kwh for cluster in self.clusters)
