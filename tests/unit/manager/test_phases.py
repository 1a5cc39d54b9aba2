"""Phases of the time to first token of a remote request, joined from reports of its router and both agents."""

import itertools
from collections.abc import Callable

import pytest

from prfaas import metrics
from prfaas.manager.routing.outcomes import AWAITED_SECONDS, MAX_TRANSFERS, OutcomeLog, transfer_phases
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.explanation import Phases

ID = b"t" * 16
REQUEST = pb.ReportRequestsRequest.Answered(
    route="remote",
    reason="long",
    status=200,
    ttft_seconds=2.0,
    decide_seconds=0.25,
    prefill_seconds=1.5,
    transfer_id=ID,
)
UNDIVIDED: Phases = {"decide": 0.25, "leg": 1.5, "handover": 0.25}
SENT = pb.ReportTransferRequest.Timing(transfer_id=ID, queue_seconds=0.5, prefill_seconds=0.75, wire_seconds=0.125)
LOADED = pb.ReportTransferRequest.Timing(transfer_id=ID, load_seconds=0.0625)
DIVIDED: Phases = {"decide": 0.25, "queue": 0.5, "prefill": 0.75, "wire": 0.125, "load": 0.0625, "rest": 0.3125}


def _seconds_by_phase() -> dict[str, float]:
    (family,) = metrics.MANAGER_TTFT_PHASE_SECONDS.collect()
    remote = [sample for sample in family.samples if sample.labels["route"] == "remote"]
    return {sample.labels["phase"]: sample.value for sample in remote if sample.name.endswith("_total")}


class Book:
    """A log with its own clock, and the phases that it has counted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log = OutcomeLog(lambda: self.now)
        self._before = _seconds_by_phase()

    def note_request(self) -> None:
        self.log.note(REQUEST)

    @property
    def counted(self) -> dict[str, float]:
        """Seconds by phase. The totals of this process hold what other tests counted, so differences are rounded."""
        found = _seconds_by_phase()
        grown = {phase: round(seconds - self._before.get(phase, 0.0), 9) for phase, seconds in found.items()}
        return {phase: seconds for phase, seconds in grown.items() if seconds}

    def after(self, seconds: float) -> dict[str, float]:
        self.now += seconds
        self.log.expire()
        return self.counted


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_reports_are_joined_in_any_order(order: tuple[int, ...]) -> None:
    book = Book()
    reports: list[Callable[[], None]] = [
        book.note_request,
        lambda: book.log.note_timing(SENT),
        lambda: book.log.note_timing(LOADED),
    ]
    for number in order:
        assert book.counted == {}
        reports[number]()
    assert book.counted == DIVIDED
    assert sum(DIVIDED.values()) == 2.0
    assert book.after(2 * AWAITED_SECONDS) == DIVIDED, "once"


@pytest.mark.parametrize("timings", [[], [SENT], [LOADED]])
def test_late_reports_leave_the_phases_undivided(timings: list[pb.ReportTransferRequest.Timing]) -> None:
    book = Book()
    for timing in timings:
        book.log.note_timing(timing)
    book.note_request()
    assert book.after(0.9 * AWAITED_SECONDS) == {}
    assert book.after(0.1 * AWAITED_SECONDS) == pytest.approx(UNDIVIDED)


def test_phases_never_exceed_the_ttft() -> None:
    phases = transfer_phases(0.5, 2.0, {"queue": 0.5, "prefill": 3.0, "wire": 1.0, "load": 1.0})
    assert phases == {"decide": 0.5, "queue": 0.5, "prefill": 1.0, "wire": 0.0, "load": 0.0, "rest": 0.0}


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_impossible_time_counts_as_missing(seconds: float) -> None:
    book = Book()
    book.note_request()
    book.log.note_timing(SENT)
    book.log.note_timing(pb.ReportTransferRequest.Timing(transfer_id=ID, load_seconds=seconds))
    assert book.after(AWAITED_SECONDS) == UNDIVIDED


def test_oldest_of_too_many_transfers_is_settled_undivided() -> None:
    book = Book()
    book.note_request()
    for number in range(MAX_TRANSFERS):
        book.log.note_timing(pb.ReportTransferRequest.Timing(transfer_id=number.to_bytes(16, "big"), load_seconds=1.0))
    assert book.counted == UNDIVIDED
