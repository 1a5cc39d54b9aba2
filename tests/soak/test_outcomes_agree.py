"""Random faults: router, managers and engines count the same outcomes, which can be joined by transfer id."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.soak.deployment_run import Plan
from tests.soak.link import run_across_link

pytestmark = pytest.mark.root
LENGTHS = [128, 512, 1024]


def _check(results: dict[str, Any]) -> None:
    records, received = results["records"], results["received"]
    outcomes = Counter(record["outcome"] for record in records)
    faults = Counter(name for name, _, _ in results["faults"])
    sys.stdout.write(f"\n{dict(faults)}\n{len(records)} requests: {dict(outcomes)}\n")
    assert [answer for answer in results["answers"] if not answer["is_honest"]] == []
    assert outcomes == results["router"] == results["managers"]
    _check_transfers(records, received)
    _check_reasons(records, received, results["fallbacks"])
    _check_answers(results["answers"], records)


def _check_transfers(records: list[dict[str, Any]], received: dict[str, str]) -> None:
    """Compare the router's outcomes of transfers with those at the decode engines, by transfer id."""
    reported = [record for record in records if record.get("transfer") and not record["failures"]]
    routed = {record["transfer_id"]: record["transfer"] for record in reported}
    assert routed == {transfer_id: received.get(transfer_id) for transfer_id in routed}


def _check_reasons(records: list[dict[str, Any]], received: dict[str, str], fallbacks: dict[str, str]) -> None:
    """Compare the reason of each fallback at the router with that at the decode engine, by transfer id."""
    fell_back = [record for record in records if record["outcome"] == "fell_back"]
    assert all(record["fallback"] and record["transfer_id"] for record in fell_back)
    routed = {record["transfer_id"]: record["fallback"] for record in fell_back}
    assert routed == {transfer_id: (received | fallbacks).get(transfer_id) for transfer_id in routed}
    sys.stdout.write(f"fallbacks: {dict(Counter(record['fallback'] for record in fell_back))}\n")


def _check_answers(answers: list[dict[str, Any]], records: list[dict[str, Any]]) -> None:
    """Compare what clients saw with the router's records, by request id."""
    outcome_of = {record["request_id"]: record["outcome"] for record in records}
    for answer in answers:
        if request_id := answer["headers"].get("x-request-id"):
            assert answer["is_whole"] == (outcome_of[request_id] in ("completed", "fell_back")), answer["error"]


@pytest.mark.timeout(300)
def test_outcomes_agree_after_a_few_faults(tmp_path: Path) -> None:
    _check(run_across_link(tmp_path, Plan(0.6, LENGTHS, [], [], random_seconds=15.0, seed=1)))


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_outcomes_of_a_thousand_requests_agree_after_ten_minutes_of_faults(tmp_path: Path) -> None:
    results = run_across_link(tmp_path, Plan(0.55, LENGTHS, [], [], random_seconds=600.0, seed=2))
    assert len(results["records"]) >= 1000
    _check(results)
