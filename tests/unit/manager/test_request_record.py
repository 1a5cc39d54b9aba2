import math
import random
from dataclasses import replace

from prfaas.manager.routing import request_record
from prfaas.manager.routing.request_record import ReportedRequest, RequestRecord

REMOTE = ReportedRequest(100.0, "remote", "completed", 2.0, "m", "acme", "east", "west", 1000)
LOCAL = replace(REMOTE, route="local", ttft_seconds=0.5, source="west", tenant="globex")
EVERYBODY: dict[str, str] = {}


def record_of(*requests: ReportedRequest) -> RequestRecord:
    record = RequestRecord()
    for request in requests:
        record.add(request)
    return record


def test_percentiles_are_requests_of_the_range_and_exact() -> None:
    generator = random.Random(3)
    requests = [replace(REMOTE, at=generator.uniform(0, 200), ttft_seconds=generator.random()) for _ in range(1000)]
    figures = record_of(*requests).figures(50, 150, num_steps=10, filters=EVERYBODY)
    ordered = sorted(request.ttft_seconds for request in requests if 50 <= request.at < 150)
    expected = [ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95, 0.99)]
    assert figures["ttft"]["remote"]["percentiles"] == expected
    assert figures["num_requests"] == sum(figures["steps"]["requests"]) == len(ordered)
    third = sorted(request.ttft_seconds for request in requests if 70 <= request.at < 80)
    assert figures["steps"]["ttft"]["remote"][0][2] == third[math.ceil(len(third) / 2) - 1]
    assert figures["ttft"]["local"]["percentiles"] == [None, None, None]


def test_request_without_a_first_token_has_no_part_in_percentiles() -> None:
    figures = record_of(REMOTE, replace(REMOTE, ttft_seconds=0.0, outcome="failed")).figures(
        0, 200, num_steps=2, filters=EVERYBODY
    )
    assert (figures["ttft"]["remote"]["count"], figures["outcomes"]["failed"], figures["num_requests"]) == (1, 1, 2)


def test_filters_leave_other_requests_out_and_offer_all_names() -> None:
    record = record_of(REMOTE, LOCAL, replace(LOCAL, model="", tenant="", source="", destination=""))
    for filters, number in (
        ({"tenant": "acme"}, 1),
        ({"cluster": "west"}, 2),
        ({"model": "m"}, 2),
        ({"tenant": "x"}, 0),
    ):
        figures = record.figures(0, 200, num_steps=2, filters=filters)
        assert (figures["num_requests"], figures["num_hidden"]) == (number, 3 - number)
        assert figures["choices"] == {"model": ["m"], "tenant": ["acme", "globex"], "cluster": ["east", "west"]}


def test_phases_that_arrive_later_count() -> None:
    record = record_of(REMOTE, REMOTE)
    record.set_phases(1, {"queue": 0.5, "wire": 1.5})
    remote = record.figures(0, 200, num_steps=1, filters=EVERYBODY)["ttft"]["remote"]
    assert (remote["num_divided"], remote["phases"]) == (1, {"queue": 0.5, "wire": 1.5})


def test_full_record_says_since_when_it_is_complete() -> None:
    record = RequestRecord()
    for number in range(request_record.MAX_REQUESTS + 10):
        record.add(replace(LOCAL, at=float(number)))
    record.set_phases(3, {"engine": 1.0})  # Another request has this row by now.
    figures = record.figures(0, 1e9, num_steps=1, filters=EVERYBODY)
    assert (figures["complete_since"], figures["num_requests"]) == (10.0, request_record.MAX_REQUESTS)
    assert figures["ttft"]["local"]["num_divided"] == 0
