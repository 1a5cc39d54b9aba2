"""The PPD table that decisions are made from: the operator's, refreshed by the turns that were answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prfaas.manager.decided import Decided
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.ppd import PpdTable, to_measured
from prfaas.scheduler.ppd_refresh import FAILED_SECONDS, PpdRefresh, Served
from prfaas.scheduler.within import turn_of

REFRESH_SECONDS = 5.0
_WAS_LOCAL = {"ppd_table_local": True, "ppd_table_pd": False}  # by the reason of the decision
MAX_SECONDS = 3600.0


class LiveTable:
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

    def note(self, decided: Decided, its: pb.ReportRequestsRequest.Answered) -> None:
        """How a request ended; what the table did not decide says nothing, nor does an answer in one piece."""
        was_local = _WAS_LOCAL.get(decided.decision.reason)
        failed = its.status >= 500 or bool(its.fallback)
        answered = its.status == 200 and its.streamed and 0 < its.ttft_seconds < MAX_SECONDS
        if self._refresh is None or was_local is None or not (failed or answered):
            return
        decode = next(one for one in decided.snapshot.instances if one.instance == decided.decision.decode)
        is_tpot = not failed and 0 < its.tpot_seconds < MAX_SECONDS
        self._refresh.note(
            Served(
                turn_of(decided.facts, decode),
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
