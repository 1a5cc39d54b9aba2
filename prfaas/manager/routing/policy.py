"""The PPD table that decisions are made from: the operator's, refreshed by the turns that were answered."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prfaas import logs
from prfaas.errors import ConfigError
from prfaas.manager.config import ManagerConfig
from prfaas.manager.routing.decision_log import RecordedDecision
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.endpoint_picker.config import load
from prfaas.scheduler.pd_prefill import later_turn
from prfaas.scheduler.ppd import FAILED_SECONDS, PpdMode, PpdRefresh, PpdTable, ServedTurn, read_measured, to_measured
from prfaas.scheduler.snapshot import LocalPolicy, WithoutPrefill

REFRESH_SECONDS = 5.0
_WAS_LOCAL = {"ppd_table_local": True, "ppd_table_pd": False}  # by the reason of the decision
MAX_SECONDS = 3600.0


class LivePpdTable:
    """The table of now; without one, and with a window of 0, what was given stays."""

    def __init__(self, table: PpdTable | None, *, window_seconds: float, clock: Callable[[], float]) -> None:
        """`clock` only goes forward."""
        self._clock = clock
        self._refresh = PpdRefresh(table, window_seconds=window_seconds) if table and window_seconds else None
        self._current = table
        self._due = 0.0

    def current(self) -> PpdTable | None:
        """At most `REFRESH_SECONDS` old."""
        now = self._clock()
        if self._refresh is not None and now >= self._due:
            self._current, self._due = self._refresh.table(now), now + REFRESH_SECONDS
        return self._current

    def note(self, decided: RecordedDecision, its: pb.ReportRequestsRequest.Answered) -> None:
        """How a request ended; what the table did not decide says nothing, nor does an answer in one piece."""
        was_local = _WAS_LOCAL.get(decided.decision.reason)
        failed = its.status >= 500 or bool(its.fallback)
        answered = its.status == 200 and its.streamed and 0 < its.ttft_seconds < MAX_SECONDS
        if self._refresh is None or was_local is None or not (failed or answered):
            return
        decode = next(
            instance for instance in decided.snapshot.instances if instance.instance == decided.decision.decode
        )
        is_tpot = not failed and 0 < its.tpot_seconds < MAX_SECONDS
        self._refresh.note(
            ServedTurn(
                later_turn(decided.facts, decode),
                decided.snapshot.requests_per_second,
                was_local=was_local,
                ttft_seconds=FAILED_SECONDS if failed else its.ttft_seconds,
                tpot_seconds=its.tpot_seconds if is_tpot else None,
                at=self._clock(),
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """In the authors' form, which `ppd_table` takes and `prfaas-ppd show` draws; empty where there is none."""
        table = self.current()
        return {} if table is None else to_measured(table)


RATE_SECONDS = 10.0  # over which requests are counted, for the rate that PPD's table is read at
MAX_COUNTED = 10_000  # of one rate: a hundred times the highest that a table of the authors has
MAX_RATES = 256  # the one longest without a request goes first
_log = logs.get("manager.policy")


@dataclass(frozen=True)
class PolicySettings:
    """The fields of a snapshot that `scheduler.within` reads, but for the rate."""

    local_policy: LocalPolicy
    non_cached_tokens: int
    ppd_table: PpdTable | None
    ppd_mode: PpdMode
    endpoint_picker: str
    local_turns_ratio: float
    without_prefill: WithoutPrefill


def read_policy(config: ManagerConfig) -> PolicySettings:
    """The policy, with its files read.

    Raises:
        ConfigError: one of them cannot be used.
    """
    table = None if config.ppd_table is None else _read_table(config)
    picker = "" if config.endpoint_picker is None else _read_picker(config.endpoint_picker)
    return PolicySettings(
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
