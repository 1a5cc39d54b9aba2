"""Keys of `kv_connector_extra_config` that `prfaas-colocate serve` writes for its connector."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prfaas.colocate.partition import PartitionSettings
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
    profile = keys["profile"]
    table = read_colocation(Path(profile))[1] if profile else None
    return PartitionSettings(**keys["partition"], table=table), keys["agent"]
