"""An engine that prefills and decodes at once: who gets which share, how long it takes, and nothing gets lost."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.model.cost.curve import polynomial
from prfaas.model.cost.profile import DecodeProfile, PrefillProfile
from prfaas.scheduler.colocation import SharingPolicy
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.engine import Callbacks, InstanceSpec, Prefill
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.model.sharing import SharedInstance, SharingSpec, modelled_speeds

SPEC = InstanceSpec(PrefillProfile(polynomial(0.01, 1e-4), 1, 1e9), DecodeProfile(0.02, 1e-4), 64)
TOGETHER = modelled_speeds(0.5, 0.04, 0.02, 0.8, 0.5)


class Bench:
    """One shared engine with nothing around it."""

    def __init__(self, itl_slo_seconds: float, spec: InstanceSpec = SPEC) -> None:
        self.timeline = Timeline()
        self.ended: list[SimulatedRequest] = []
        callbacks = Callbacks(lambda *_: None, lambda _: None, self.ended.append)
        sharing = SharingSpec(SharingPolicy(itl_slo_seconds), TOGETHER)
        self.instance = SharedInstance(self.timeline, spec, callbacks, sharing=sharing)

    def ask(self, moment: float, prompt: int, output: int) -> SimulatedRequest:
        request = SimulatedRequest(0, moment, num_prompt_tokens=prompt, num_output_tokens=output)
        self.timeline.at(moment, self.instance.prefill, Prefill(request, prompt, 0, stays=True))
        return request

    def num_gaps(self) -> float:
        return sum(float(request.gaps[1].sum()) for request in self.ended)


def test_a_prompt_alone_has_the_whole_device() -> None:
    bench = Bench(0.1)
    request = bench.ask(0.0, 10_000, 1)
    bench.timeline.run()
    assert request.first_token == pytest.approx(SPEC.prefill.seconds(10_000))


def test_decode_alone_has_the_whole_device() -> None:
    bench = Bench(0.1)
    request = bench.ask(0.0, 100, 11)
    bench.timeline.run()
    assert request.tpot == pytest.approx(0.0201)


def test_loose_objective_over_allocates() -> None:
    bench = Bench(0.1)
    delayed, long = bench.ask(0.0, 100, 200), bench.ask(1.0, 10_000, 1)
    bench.timeline.run()
    assert delayed.gap_quantile(1.0) == pytest.approx(0.0201 / 0.5)
    assert long.prefill_end - long.prefill_start == pytest.approx(1.01 / 0.8, rel=0.03)


def test_tight_objective_gives_decode_only_what_it_needs() -> None:
    bench = Bench(0.025)
    delayed, long = bench.ask(0.0, 100, 400), bench.ask(1.0, 10_000, 1)
    bench.timeline.run()
    assert delayed.gap_quantile(1.0) <= 0.025
    assert long.prefill_end - long.prefill_start == pytest.approx(1.01 / (0.55 * 0.98), rel=0.03)


def test_transferred_request_has_its_first_token_after_a_step() -> None:
    bench = Bench(0.1)
    request = SimulatedRequest(0, 0.0, num_prompt_tokens=100, num_output_tokens=3)
    bench.timeline.at(0.0, bench.instance.decode, request)
    bench.timeline.run()
    assert request.first_token == pytest.approx(0.0201)
    assert request.decode_end == pytest.approx(3 * 0.0201)
    # The first token follows no gap.
    assert bench.num_gaps() == 2


def test_step_before_a_death_ends_no_request_after_it() -> None:
    bench = Bench(0.1)
    lost = bench.ask(0.0, 1, 100)
    bench.timeline.at(0.015, lambda _: bench.instance.stop(), None)
    bench.timeline.at(0.016, lambda _: bench.instance.restart(), None)
    kept = bench.ask(0.017, 1, 100)
    bench.timeline.run()
    assert bench.ended == [kept]
    assert math.isnan(lost.decode_end)
    assert kept.tpot == pytest.approx(0.0201)


asked = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 20_000), st.integers(1, 60)), min_size=1, max_size=15)


def test_preempted_request_of_a_shared_instance_is_prefilled_again() -> None:
    bench = Bench(0.1, replace(SPEC, kv_tokens=2100))
    first, second = bench.ask(0.0, 1000, 101), bench.ask(0.0, 1000, 101)
    bench.timeline.run()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert second.decode_end > first.decode_end + SPEC.prefill.seconds(1000)
    assert bench.num_gaps() == 200


rooms = st.sampled_from([float("inf"), 21_000])


@given(asked, st.sampled_from([0.01, 0.025, 0.1]), st.sampled_from([1, 3, 64]), rooms)
def test_prompts_are_prefilled_in_order_and_all_tokens_made(
    asks: list[tuple[float, int, int]], itl_slo_seconds: float, max_batch: int, room: float
) -> None:
    spec = replace(SPEC, max_batch=max_batch, kv_tokens=room)
    bench = Bench(itl_slo_seconds, spec)
    requests = [bench.ask(*ask) for ask in sorted(asks)]
    bench.timeline.run()
    assert len(bench.ended) == len(requests)
    assert bench.num_gaps() == sum(request.num_output_tokens - 1 for request in requests)
    starts = [request.prefill_start for request in requests]
    assert starts == sorted(starts)
    assert all(request.decode_end >= request.first_token > request.arrival for request in requests)
