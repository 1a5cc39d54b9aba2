"""Keys of `kv_connector_extra_config` that `prfaas-colocate serve` writes for its connector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prfaas.colocate.partition import PartitionSettings
from prfaas.model.cost.colocation import ShareTable
from prfaas.solve.files.profile_file import read_colocation


def write(
    *, itl_slo_seconds: float, decode_share: float, profile: Path | None, agent: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys. `agent` are the settings of `PrfaasConnector`; without any there is no agent."""
    partition = {"itl_slo_seconds": itl_slo_seconds, "decode_share": decode_share}
    return {"partition": partition, "profile": str(profile or ""), "agent": dict(agent)}


def read(keys: Mapping[str, Any]) -> tuple[PartitionSettings, dict[str, Any]]:
    """Return the manager's settings, and those of the agent's connector.

    Raises:
        ConfigError: The profile cannot be read.
    """
    table = _share_table(Path(keys["profile"])) if keys["profile"] else None
    return PartitionSettings(**keys["partition"], table=table), keys["agent"]


def _share_table(profile: Path) -> ShareTable:
    """Return decode steps by share, without over-allocation where any share of its own prefills faster.

    So it is on few cores, where two teams of threads wait for each other.
    """
    measured, table = read_colocation(profile)
    slowest = max((point.seconds for point in measured.prefill if point.share < 1.0), default=math.inf)
    if all(point.seconds <= slowest for point in measured.prefill if point.share == 1.0):
        return table
    return replace(table, overallocated_seconds=(math.inf,) * len(table.batches))
