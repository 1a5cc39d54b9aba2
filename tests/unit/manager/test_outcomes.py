import math

import pytest
from prometheus_client import REGISTRY

from prfaas import metrics
from prfaas.manager.routing import outcomes
from prfaas.manager.routing.outcomes import MAX_OUTCOMES, OutcomeLog, RequestOutcome
from prfaas.rpc.generated import manager_pb2 as pb

LOCAL = pb.ReportRequestsRequest.Answered(
    decision_id=b"local", route="local", reason="short", status=200, ttft_seconds=0.5, decide_seconds=0.1
)
REMOTE = pb.ReportRequestsRequest.Answered(
    decision_id=b"remote",
    route="remote",
    reason="long",
    status=200,
    ttft_seconds=2.0,
    decide_seconds=0.25,
    prefill_seconds=1.5,
)


def noted(report: pb.ReportRequestsRequest.Answered, **changes: object) -> RequestOutcome | None:
    changed = pb.ReportRequestsRequest.Answered()
    changed.CopyFrom(report)
    for name, value in changes.items():
        setattr(changed, name, value)
    book = OutcomeLog(lambda: 0.0)
    book.note(changed)
    return book.get(changed.decision_id)


def count_of(**labels: str) -> float:
    return sum(
        float(count["count"])
        for count in outcomes.counts_by_reason(metrics.MANAGER_ANSWERED)
        if labels.items() <= count.items()
    )


def test_phases_add_up_to_the_ttft() -> None:
    assert noted(LOCAL) == RequestOutcome("completed", "", 0.5, {"decide": 0.1, "engine": 0.4})
    assert noted(REMOTE) == RequestOutcome("completed", "", 2.0, {"decide": 0.25, "leg": 1.5, "handover": 0.25})
    late = noted(REMOTE, prefill_seconds=0.0)  # The prefill leg was answered after the first token.
    assert late is not None and late.phases == {"decide": 0.25, "leg": 1.75, "handover": 0.0}


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"fallback": "prefill_late"}, "fell_back"),
        ({"ttft_seconds": 0.0}, "failed"),
        ({"ttft_seconds": math.nan}, "failed"),
        ({"ttft_seconds": math.inf}, "failed"),
        ({"status": 503}, "failed"),
    ],
)
def test_request_with_a_failed_leg_has_no_phases(changes: dict[str, object], outcome: str) -> None:
    ended = noted(REMOTE, **changes)
    assert ended is not None and (ended.outcome, ended.phases) == (outcome, {})


def test_no_phase_is_negative_or_longer_than_the_ttft() -> None:
    for decide, prefill in ((-1.0, -1.0), (9.0, 9.0), (math.nan, math.nan), (math.inf, 1.0)):
        ended = noted(REMOTE, decide_seconds=decide, prefill_seconds=prefill)
        assert ended is not None and all(0 <= seconds <= 2.0 for seconds in ended.phases.values())
        assert sum(ended.phases.values()) == 2.0


def test_unknown_reasons_become_no_label() -> None:
    before = count_of()
    assert noted(LOCAL, reason="because") is None
    assert noted(LOCAL, route="sideways") is None
    assert count_of() == before
    noted(LOCAL)
    assert count_of() == before + 1


def test_first_tokens_are_counted_with_their_seconds() -> None:
    before = REGISTRY.get_sample_value("prfaas_manager_ttft_seconds_sum", {"route": "remote"}) or 0.0
    noted(REMOTE)
    assert REGISTRY.get_sample_value("prfaas_manager_ttft_seconds_sum", {"route": "remote"}) == before + 2.0


def test_only_the_latest_outcomes_are_kept() -> None:
    book = OutcomeLog(lambda: 0.0)
    for number in range(MAX_OUTCOMES + 1):
        book.note(
            pb.ReportRequestsRequest.Answered(
                decision_id=number.to_bytes(8, "big"), route="local", reason="short", ttft_seconds=1.0
            )
        )
    assert book.get((0).to_bytes(8, "big")) is None
    assert book.get((1).to_bytes(8, "big")) is not None


def test_the_routers_word_is_counted_and_a_fallback_by_its_reason() -> None:
    before = {word: count_of(outcome=word) for word in ("completed", "fell_back", "cancelled")}
    fallbacks = fallbacks_of("checksum")
    assert noted(REMOTE, outcome="fell_back", fallback="checksum", transfer_id=b"\x01\x02") == RequestOutcome(
        "fell_back", "checksum", 2.0, {}, "0102"
    )
    noted(REMOTE, outcome="cancelled", ttft_seconds=0.0, status=0)
    noted(REMOTE, outcome="completed", fallback="deadline")
    changed = {word: count_of(outcome=word) - count for word, count in before.items()}
    assert changed == {"completed": 1, "fell_back": 1, "cancelled": 1}
    assert fallbacks_of("checksum") == fallbacks + 1 and fallbacks_of("deadline") == 0


def test_a_repeated_report_is_known_by_its_number() -> None:
    book = OutcomeLog(lambda: 0.0)
    found = [book.is_repeated(*key) for key in ((b"a", 1), (b"a", 1), (b"b", 1), (b"a", 3), (b"a", 2), (b"", 0))]
    assert found == [False, True, False, False, True, False]


def test_a_router_cannot_make_any_number_of_labels() -> None:
    book = OutcomeLog(lambda: 0.0)
    for number in range(outcomes.MAX_FALLBACK_REASONS + 5):
        report = pb.ReportRequestsRequest.Answered()
        report.CopyFrom(REMOTE)
        report.outcome, report.fallback = "fell_back", f"strange_{number}"
        book.note(report)
    assert fallbacks_of("unknown") == 5


def fallbacks_of(reason: str) -> float:
    return REGISTRY.get_sample_value("prfaas_manager_fallbacks_total", {"reason": reason}) or 0.0
