"""Flows share an egress equally, arrive when they must, and no byte is lost or made."""

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


def test_two_flows_halve_the_egress() -> None:
    seen = Arrivals()
    egress = Egress(seen.timeline, 100.0)
    egress.send(100.0, seen.note, "short")
    egress.send(300.0, seen.note, "long")
    seen.timeline.run()
    assert seen.at == {"short": pytest.approx(2.0), "long": pytest.approx(4.0)}


def test_half_a_round_trip_passes_after_the_last_byte() -> None:
    seen = Arrivals()
    Egress(seen.timeline, 50.0, rtt_seconds=0.2).send(100.0, seen.note, "one")
    seen.timeline.run()
    assert seen.at["one"] == pytest.approx(2.1)


@pytest.mark.parametrize(
    ("num_layers", "rate", "num_bytes", "end"),
    [
        pytest.param(1, 100.0, 200.0, 5.0 + 2.0, id="all after the prefill"),
        pytest.param(40, 100.0, 200.0, 5.0 + 2.0 / 40, id="the last layer after the prefill"),
        pytest.param(8, 10.0, 800.0, 5.0 / 8 + 80.0, id="busy from the first piece on"),
    ],
)
def test_kv_leaves_while_prefill_computes(num_layers: int, rate: float, num_bytes: float, end: float) -> None:
    seen = Arrivals()
    transfers = Transfers(seen.timeline, Egress(seen.timeline, rate), num_layers=num_layers)
    transfers.start(request(), num_bytes, prefill_seconds=5.0, arrived=seen.note)
    seen.timeline.run()
    assert list(seen.at.values()) == [pytest.approx(end)]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(1, 1e9)), min_size=1, max_size=30), st.floats(1e3, 1e8))
def test_every_byte_that_enters_an_egress_leaves_it(sent: list[tuple[float, float]], capacity: float) -> None:
    seen = Arrivals()
    egress = Egress(seen.timeline, capacity, rtt_seconds=0.05)
    for index, (moment, num_bytes) in enumerate(sent):
        seen.timeline.at(moment, lambda flow: egress.send(*flow), (num_bytes, seen.note, index))
    seen.timeline.run()
    assert len(seen.at) == len(sent)
    assert egress.sent.total == pytest.approx(sum(num_bytes for _, num_bytes in sent), rel=1e-6)
    for index, (moment, num_bytes) in enumerate(sent):
        assert seen.at[index] >= moment + num_bytes / capacity * (1 - 1e-6)
    assert egress.busy.total * capacity >= egress.sent.total * (1 - 1e-6)
