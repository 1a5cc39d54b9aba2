"""Files of a manager's policy, and the PPD table that recent requests refresh."""

import json
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prfaas import logs
from prfaas.errors import ConfigError
from prfaas.manager.routing.decision_log import RecordedDecision
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.endpoint_picker.config import load
from prfaas.scheduler.pd_prefill import WAS_LOCAL, later_turn
from prfaas.scheduler.ppd import FAILED_SECONDS, PpdRefresh, PpdTable, ServedTurn, read_measured, to_measured

MAX_SECONDS = 3600.0


class LivePpdTable:
    """PPD table that recent turns refresh. Without a table it stays empty."""

    def __init__(self, table: PpdTable | None, *, clock: Callable[[], float]) -> None:
        """`clock` is monotonic."""
        self._clock = clock
        self._refresh = PpdRefresh(table) if table else None

    def current(self) -> PpdTable | None:
        """Return the table of late."""
        return self._refresh.current(self._clock()) if self._refresh is not None else None

    def note(self, recorded: RecordedDecision, report: pb.ReportRequestsRequest.Answered) -> None:
        """Record the outcome of a turn that the table decided.

        Responses that were not streamed have no TTFT and are skipped.
        """
        was_local = WAS_LOCAL.get(recorded.decision.reason)
        is_failed = report.status >= 500 or bool(report.fallback)
        is_answered = report.status == 200 and report.streamed and 0 < report.ttft_seconds < MAX_SECONDS
        if self._refresh is None or was_local is None or not (is_failed or is_answered):
            return
        decode = next(
            instance for instance in recorded.snapshot.instances if instance.instance == recorded.decision.decode
        )
        has_tpot = not is_failed and 0 < report.tpot_seconds < MAX_SECONDS
        self._refresh.note(
            ServedTurn(
                later_turn(recorded.facts, decode),
                recorded.snapshot.requests_per_second,
                was_local=was_local,
                ttft_seconds=FAILED_SECONDS if is_failed else report.ttft_seconds,
                tpot_seconds=report.tpot_seconds if has_tpot else None,
                at=self._clock(),
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the table in the form of the setting `ppd_table`, with scores; empty without a table."""
        table = self.current()
        return {} if table is None else to_measured(table)


RATE_SECONDS = 10.0  # Window of the request rate that PPD's table is read at.
MAX_COUNTED = 10_000  # Bound per rate, a hundred times the highest in the authors' tables.
MAX_RATES = 256  # The least recently used rate goes first.
_log = logs.get("manager.policy")


def read_endpoint_picker(path: Path | None) -> str:
    """Return the text of an EndpointPickerConfig after loading it; empty without a file. Ignored parts are logged.

    Raises:
        ConfigError: the file cannot be used.
    """
    if path is None:
        return ""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"endpoint_picker: {path} cannot be read: {error}") from error
    for warning in load(text, name=f"endpoint_picker: {path}").warnings:
        _log.warning("endpoint_picker.setting_ignored", file=str(path), warning=warning)
    return text


def read_ppd_table(path: Path | None) -> PpdTable | None:
    """Return the table of a file, or None without a file.

    Raises:
        ConfigError: the file cannot be used.
    """
    if path is None:
        return None
    try:
        return read_measured(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"ppd_table: {path} cannot be used: {error}") from error


class RequestRates:
    """Requests per second of each model and PD cluster, as its routers name it. Times are monotonic seconds."""

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
