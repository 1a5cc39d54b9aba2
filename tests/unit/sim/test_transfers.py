"""Flows share links and egress fairly, arrive when they must, and no byte is lost or made."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.network import Egress, Transfers
from prfaas.sim.model.request import SimulatedRequest


class Arrivals:
    """Arrival time of each flow."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.at: dict[object, float] = {}

    def note(self, name: object) -> None:
        self.at[name] = self.timeline.now


def request() -> SimulatedRequest:
    return SimulatedRequest(0, 0.0, num_prompt_tokens=1000, num_output_tokens=1)


def test_two_flows_of_one_link_halve_it() -> None:
    seen = Arrivals()
    egress = Egress(seen.timeline, 100.0)
    link = egress.link(math.inf)
    egress.send(link, 100.0, seen.note, "short")
    egress.send(link, 300.0, seen.note, "long")
    seen.timeline.run()
    assert seen.at == {"short": pytest.approx(2.0), "long": pytest.approx(4.0)}


def test_slow_link_leaves_its_unused_rate_to_the_rest() -> None:
    seen = Arrivals()
    egress = Egress(seen.timeline, 100.0)
    slow, fast = egress.link(10.0), egress.link(math.inf)
    egress.send(slow, 10.0, seen.note, "slow")
    egress.send(fast, 90.0, seen.note, "fast")
    seen.timeline.run()
    assert seen.at == {"slow": pytest.approx(1.0), "fast": pytest.approx(1.0)}


def test_half_a_round_trip_passes_after_the_last_byte() -> None:
    seen = Arrivals()
    egress = Egress(seen.timeline, 100.0)
    egress.send(egress.link(50.0, rtt_seconds=0.2), 100.0, seen.note, "one")
    seen.timeline.run()
    assert seen.at["one"] == pytest.approx(2.1)


def test_without_overlap_the_kv_leaves_after_the_prefill() -> None:
    seen = Arrivals()
    egress = Egress(seen.timeline, 100.0)
    transfers = Transfers(seen.timeline, egress, egress.link(math.inf), num_layers=1)
    transfers.start(request(), 200.0, prefill_seconds=5.0, arrived=seen.note)
    seen.timeline.run()
    assert list(seen.at.values()) == [pytest.approx(7.0)]


def test_with_overlap_only_the_last_layer_leaves_after_prefill() -> None:
    seen = Arrivals()
    egress = Egress(seen.timeline, 100.0)
    transfers = Transfers(seen.timeline, egress, egress.link(math.inf), num_layers=40)
    transfers.start(request(), 200.0, prefill_seconds=5.0, arrived=seen.note)
    seen.timeline.run()
    assert list(seen.at.values()) == [pytest.approx(5.0 + 2.0 / 40)]


def test_a_link_slower_than_the_prefill_is_busy_from_the_first_piece_on() -> None:
    seen = Arrivals()
    egress = Egress(seen.timeline, 10.0)
    transfers = Transfers(seen.timeline, egress, egress.link(math.inf), num_layers=8)
    transfers.start(request(), 800.0, prefill_seconds=8.0, arrived=seen.note)
    seen.timeline.run()
    assert list(seen.at.values()) == [pytest.approx(1.0 + 80.0)]


flows = st.tuples(st.floats(0, 100), st.floats(1, 1e9), st.integers(0, 2))


@given(st.lists(flows, min_size=1, max_size=30), st.floats(1e3, 1e8), st.lists(st.floats(1e3, 1e9), min_size=3))
def test_every_byte_that_enters_a_link_leaves_it(
    sent: list[tuple[float, float, int]], capacity: float, rates: list[float]
) -> None:
    seen = Arrivals()
    egress = Egress(seen.timeline, capacity)
    links = [egress.link(rate, rtt_seconds=0.05) for rate in rates[:3]]
    for index, (moment, num_bytes, link) in enumerate(sent):
        chosen = (links[link], num_bytes, seen.note, index)
        seen.timeline.at(moment, lambda flow: egress.send(*flow), chosen)
    seen.timeline.run()
    assert len(seen.at) == len(sent)
    assert egress.sent.total == pytest.approx(sum(num_bytes for _, num_bytes, _ in sent), rel=1e-6)
    for index, (moment, num_bytes, link) in enumerate(sent):
        fastest = num_bytes / min(capacity, links[link].rate)
        assert seen.at[index] >= moment + fastest * (1 - 1e-6)
    assert egress.busy.total * capacity >= egress.sent.total * (1 - 1e-6)
