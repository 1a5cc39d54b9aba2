"""Keys of `kv_connector_extra_config` that `prfaas-colocate serve` writes for its connector."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prfaas import config
from prfaas.colocate.partition import PartitionSettings
from prfaas.model.cost.colocation import ShareTable
from prfaas.solve.files.profile_file import ProfileFile, read_colocation

_GAIN = 0.9  # A smaller gain is within the noise of a profile.


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
    if not keys["profile"]:
        return PartitionSettings(**keys["partition"]), keys["agent"]
    profile = Path(keys["profile"])
    table = read_colocation(profile)
    return PartitionSettings(**keys["partition"], table=table, decode_spreads=_spreads(profile, table)), keys["agent"]


def _spreads(profile: Path, table: ShareTable) -> bool:
    """Return whether all cores make a step of decode alone faster than a share of them, beside a prefill, does."""
    alone = {point.batch: point.step for point in config.load_file(ProfileFile, profile).decode.points}
    steps = dict(zip(table.batches, table.seconds, strict=True))
    return not alone.keys() & steps.keys() or any(
        alone[batch] < _GAIN * min(steps[batch]) for batch in alone.keys() & steps.keys()
    )
