"""What is in this node's pool and on its SSD, in numbers: for the metrics and for the status page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prfaas import metrics
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.ssd import Ssd


def measure(pool: Pool, ssd: Ssd | None, *, tenants: Iterable[str]) -> None:
    """Set the gauges; of tenants those that are named."""
    stats = pool.stats()
    for kind, count in stats.slots_by_kind.items():
        metrics.POOL_SLOTS.labels(kind=kind).set(count)
    metrics.POOL_NEWCOMER_BYTES.set(stats.newcomer_bytes)
    for tenant in tenants:
        metrics.POOL_TENANT_BYTES.labels(tenant=tenant).set(stats.tenant_bytes.get(tenant, 0))
    for kind, count in (ssd.slots_by_kind() if ssd else {}).items():
        metrics.SSD_SLOTS.labels(kind=kind).set(count)


def page(pool: Pool, ssd: Ssd | None) -> dict[str, Any]:
    """The same for people."""
    stats = pool.stats()
    return {
        "pool": stats.slots_by_kind,
        "leases": stats.num_leases,
        "prefix_bytes": stats.prefix_bytes,
        "newcomer_bytes": stats.newcomer_bytes,
        "tenant_bytes": stats.tenant_bytes,
        "ssd": ssd.slots_by_kind() if ssd else None,
    }
