from __future__ import annotations

from dataclasses import dataclass

from prfaas.connector.scheduler.parked import ParkedRequests


@dataclass
class Request:
    request_id: str
    skip_reading_prefix_cache: bool = False


def _is_marked(request: Request) -> bool:
    return request.skip_reading_prefix_cache


def test_one_whose_wait_ends_during_the_step_is_looked_up_in_the_next() -> None:
    parked, waiting, ready = ParkedRequests(), Request("a"), Request("b")
    parked.park(waiting)
    parked.park(ready)
    parked.mark(lambda request_id: True)
    parked.unmark(lambda request_id: request_id == "a")
    assert (_is_marked(waiting), _is_marked(ready)) == (True, False)
    assert not parked.wake(ready)


def test_a_request_that_was_not_asked_for_in_a_step_keeps_its_mark() -> None:
    """A step whose token budget is spent asks for nobody."""
    parked, request = ParkedRequests(), Request("a")
    parked.park(request)
    parked.mark(lambda request_id: True)
    parked.mark(lambda request_id: False)
    assert parked.wake(request)


def test_a_request_that_has_ended_is_forgotten() -> None:
    parked, request = ParkedRequests(), Request("a")
    parked.park(request)
    parked.mark(lambda request_id: True)
    parked.forget("a")
    assert not parked.wake(Request("a"))
