"""What prefills requests within their PD cluster, as the manager's settings say."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from pathlib import Path

from prfaas import logs
from prfaas.errors import ConfigError
from prfaas.manager.config import ManagerConfig
from prfaas.scheduler.endpoint_picker.config import load
from prfaas.scheduler.ppd import PpdMode, PpdTable, read_measured
from prfaas.scheduler.snapshot import LocalPolicy, WithoutPrefill

RATE_SECONDS = 10.0  # over which requests are counted, for the rate that PPD's table is read at
MAX_COUNTED = 10_000  # of one rate: a hundred times the highest that a table of the authors has
MAX_RATES = 256  # the one longest without a request goes first
_log = logs.get("manager.policy")


@dataclass(frozen=True)
class WithinPolicy:
    """The fields of a snapshot that `scheduler.within` reads, but for the rate."""

    local_policy: LocalPolicy
    non_cached_tokens: int
    ppd_table: PpdTable | None
    ppd_mode: PpdMode
    endpoint_picker: str
    local_turns_ratio: float
    without_prefill: WithoutPrefill


def read_policy(config: ManagerConfig) -> WithinPolicy:
    """The policy, with its files read.

    Raises:
        ConfigError: one of them cannot be used.
    """
    table = None if config.ppd_table is None else _read_table(config)
    picker = "" if config.endpoint_picker is None else _read_picker(config.endpoint_picker)
    return WithinPolicy(
        config.local_policy,
        config.non_cached_tokens,
        table,
        config.ppd_mode,
        picker,
        config.local_turns_ratio,
        config.without_prefill,
    )


def _read_picker(path: Path) -> str:
    """An EndpointPickerConfig's text, once it has been loaded; what it says in vain is logged."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"endpoint_picker: {path} cannot be read: {error}") from error
    for warning in load(text, name=f"endpoint_picker: {path}").warnings:
        _log.warning("endpoint_picker.config", file=str(path), warning=warning)
    return text


def _read_table(config: ManagerConfig) -> PpdTable:
    assert config.ppd_table is not None
    try:
        table = read_measured(json.loads(config.ppd_table.read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"ppd_table: {config.ppd_table} cannot be used: {error}") from error
    ttft, tpot = config.ppd_ttft_weight, config.ppd_tpot_weight
    return replace(
        table,
        ttft_weight=table.ttft_weight if ttft is None else ttft,
        tpot_weight=table.tpot_weight if tpot is None else tpot,
    )


class RequestRates:
    """Requests per second over the last ten, of each PD cluster (as its routers name it) and model.

    Times are seconds on a clock that only goes forward.
    """

    def __init__(self) -> None:
        self._at: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()

    def count(self, cluster: str, model: str, now: float) -> None:
        at = self._at.setdefault((cluster, model), deque(maxlen=MAX_COUNTED))
        at.append(now)
        self._at.move_to_end((cluster, model))
        if len(self._at) > MAX_RATES:
            self._at.popitem(last=False)

    def per_second(self, cluster: str, model: str, now: float) -> float:
        at = self._at.get((cluster, model), deque())
        while at and at[0] <= now - RATE_SECONDS:
            at.popleft()
        return len(at) / RATE_SECONDS
