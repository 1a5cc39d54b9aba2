"""How a scenario's instances work beyond their profiles: policy within the PD cluster, chunks, caches, transfers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.cachepool.eviction import policy_of
from prfaas.errors import ConfigError
from prfaas.scheduler.ppd import PpdTable, read_measured
from prfaas.scheduler.snapshot import LocalPolicy
from prfaas.sim.config.scenario import Scenario
from prfaas.sim.model.blueprint import DEFAULT_CACHE_BLOCKS
from prfaas.sim.model.colocated import Interference, Speeds, read_sharing
from prfaas.sim.model.instance_faults import Operations, read_outages, read_role_changes
from prfaas.sim.model.link_faults import CrossTraffic, read_cross_traffic, read_link_changes
from prfaas.sim.model.network import CongestionControl, LossyPath
from prfaas.sim.model.prefix_cache import CacheRules

_LOCAL_POLICIES: dict[str, LocalPolicy] = {"decode": "decode", "pd": "pd", "ppd": "ppd", "suffix": "suffix"}


@dataclass(frozen=True)
class InstanceSettings:
    """What prefills within the PD cluster is `local_policy`; `requests_per_second` is what PPD's table is read at."""

    local_policy: LocalPolicy = "pd"
    non_cached_tokens: int = 0
    ppd_table: PpdTable | None = None
    requests_per_second: float = 0.0
    chunk_tokens: int | None = None
    cache_blocks: int = DEFAULT_CACHE_BLOCKS
    caches: CacheRules = field(default_factory=lambda: CacheRules(block_tokens=512))
    num_layers: int = 1
    path: LossyPath = field(default_factory=LossyPath)
    cross_traffic: CrossTraffic | None = None
    follows_congestion: bool = False
    seed: int = 0  # of what others send
    max_sessions: float = float("inf")
    operations: Operations = field(default_factory=Operations)
    kv_tokens: float | None = None  # of each PD engine; the profile's memory when None
    preempts: bool = True
    interference: Speeds | None = None  # PD instances that prefill and decode at the same time


def instance_settings(scenario: Scenario, rate: float) -> InstanceSettings:
    """Return the scenario's.

    Raises:
        ConfigError: the PPD table, an outage, a role change or a change of a link cannot be used.
    """
    tokens, block_tokens = scenario.cache_tokens, scenario.block_tokens
    return InstanceSettings(
        local_policy="decode" if scenario.shared else _LOCAL_POLICIES[scenario.local_policy],
        non_cached_tokens=scenario.non_cached_tokens,
        ppd_table=None if scenario.ppd_table is None else _ppd_table(scenario.ppd_table),
        requests_per_second=rate,
        chunk_tokens=scenario.chunk_tokens,
        kv_tokens=scenario.kv_tokens,
        preempts=scenario.preemption,
        cache_blocks=DEFAULT_CACHE_BLOCKS if tokens is None else tokens // block_tokens,
        caches=CacheRules(block_tokens, policy_of(scenario.eviction), scenario.announce),
        num_layers=scenario.layers,
        path=lossy_path(scenario),
        cross_traffic=read_cross_traffic(scenario.cross_traffic),
        follows_congestion=scenario.congestion,
        seed=scenario.seed,
        operations=Operations(
            read_outages(scenario.outages),
            read_role_changes(scenario.role_changes),
            read_link_changes(scenario.link_changes),
            scenario.heartbeats,
        ),
        interference=speeds(scenario) if scenario.shared else None,
    )


def speeds(scenario: Scenario) -> Speeds:
    """Of two sides that share a device: measured where the scenario names a profile, else RAPID-Serve's.

    Raises:
        ConfigError: as `read_sharing`.
    """
    return Interference() if scenario.sharing_profile is None else read_sharing(scenario.sharing_profile)


def lossy_path(scenario: Scenario) -> LossyPath:
    """Between clusters."""
    control: CongestionControl = "cubic" if scenario.congestion_control == "cubic" else "bbr"
    return LossyPath(scenario.rtt, scenario.link_loss or 0.0, scenario.connections, control)


def _ppd_table(path: Path) -> PpdTable:
    try:
        return read_measured(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"ppd_table: {path}: {error}; write a file as prfaas-ppd writes it, in JSON") from error
