"""The plan in force: t, what the split should be, and where each input came from. Plain data, recorded as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prfaas.scheduler.roles import Role
from prfaas.types import InstanceId

# What the operator, or `role_changes`, should do: nothing, change roles to `best_splits`, or give every instance both.
Advice = Literal["keep", "other_split", "do_not_disaggregate"]
OFFLOAD_NOTHING = (1 << 31) - 1  # t of a plan under which every prompt stays


@dataclass(frozen=True)
class ClusterSupply:
    """What a PrfaaS cluster's links take and its instances make, in requests of the mean offloaded length per second."""

    link_requests_per_second: float
    prefill_requests_per_second: float


@dataclass(frozen=True)
class ThresholdPlan:
    """One version. `splits` are instances as [prefill, decode] by PD cluster: as they are, and as would be best."""

    version: int
    made_at: float  # seconds since 1970
    threshold_tokens: int
    requests_per_second: float  # that the deployment sustains
    offload_ratio: float
    limit: str  # the stage that bounds it
    splits: Mapping[str, tuple[float, float]]
    best_splits: Mapping[str, tuple[float, float]]
    best_requests_per_second: float
    supplies: Mapping[str, ClusterSupply]
    inputs: Mapping[str, str]  # each input and its source
    roles: Mapping[InstanceId, Role] = field(default_factory=dict)  # in place of those that instances announce
    draining: Mapping[InstanceId, Role] = field(default_factory=dict)  # get nothing new, and then this role
    arrivals_per_second: float = 0.0  # measured; 0: unknown
    ttft_seconds: float | None = None  # the mean at these arrivals, queues included; None: unknown, or without bound
    undivided_requests_per_second: float = 0.0  # did every PD instance prefill and decode, disturbed by neither
    advice: Advice = "keep"

    def to_json(self) -> bytes:
        """The inverse of `from_json`."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_json(data: bytes) -> ThresholdPlan:
        """Raises ValueError when it is none."""
        try:
            fields: dict[str, Any] = json.loads(data)
            read: dict[str, Any] = {
                name: {cluster: (float(p), float(d)) for cluster, (p, d) in fields[name].items()}
                for name in ("splits", "best_splits")
            }
            read["supplies"] = {cluster: ClusterSupply(**its) for cluster, its in fields["supplies"].items()}
            return ThresholdPlan(**{**fields, **read})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a plan: {error}") from error
