"""What a pool holds, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolStats:
    """Number of slots by kind, over all arenas: prefix, transfer, quarantined and free are apart from each other."""

    slots_by_kind: dict[str, int]
    prefix_bytes: int
    transfer_bytes: int
    num_leases: int
    num_evicted: int
    newcomer_bytes: int  # of the prefix bytes: what nobody has asked for since it was stored
    tenant_bytes: dict[str, int]  # of the prefix bytes: by tenant, for those with a limit
