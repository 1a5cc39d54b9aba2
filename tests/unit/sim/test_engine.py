"""Engines iterate as continuous batching does: the closed form of decode runs equals step by step."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.model.cost.curve import polynomial
from prfaas.model.cost.profile import DecodeProfile, PrefillProfile
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.engine import Callbacks, InstanceSpec, Prefill, SimulatedInstance
from prfaas.sim.model.request import SimulatedRequest

PREFILL = PrefillProfile(polynomial(0.02, 1e-4, 1e-9), 1, 1e9)
DECODE = DecodeProfile(0.01, 1e-3, 1e-6)


class Bench:
    """One engine with nothing around it."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.timeline = Timeline()
        self.last_chunks: list[float] = []
        self.ended: list[SimulatedRequest] = []
        callbacks = Callbacks(lambda _, seconds: self.last_chunks.append(seconds), lambda _: None, self.ended.append)
        self.instance = SimulatedInstance(self.timeline, spec, callbacks)

    def decode_at(self, moment: float, request: SimulatedRequest) -> None:
        self.timeline.at(moment, self.instance.decode, request)

    def prefill_at(self, moment: float, prefill: Prefill) -> None:
        self.timeline.at(moment, self.instance.prefill, prefill)


def num_gaps(requests: Sequence[SimulatedRequest]) -> float:
    return sum(float(request.gaps[1].sum()) for request in requests)


def make_request(prompt: int, output: int, arrival: float = 0.0) -> SimulatedRequest:
    return SimulatedRequest(0, arrival, num_prompt_tokens=prompt, num_output_tokens=output)


def step_by_step(asked: list[tuple[float, int, int]], max_batch: int) -> list[tuple[float, float]]:
    """(first token, end) of decode requests given as (moment, context, tokens), one step after the other."""
    now, waiting, batch = 0.0, sorted(enumerate(asked), key=lambda pair: (pair[1][0], pair[0])), dict[int, list[int]]()
    first, end = dict[int, float](), dict[int, float]()
    while waiting or batch:
        if not batch and waiting[0][1][0] > now:
            now = waiting[0][1][0]
        while waiting and waiting[0][1][0] <= now and len(batch) < max_batch:
            index, (_, context, tokens) = waiting.pop(0)
            batch[index] = [context, tokens]
        now += 0.01 + 1e-3 * len(batch) + 1e-6 * sum(context for context, _ in batch.values())
        for index in list(batch):
            first.setdefault(index, now)
            batch[index] = [batch[index][0] + 1, batch[index][1] - 1]
            if not batch[index][1]:
                end[index] = now
                del batch[index]
    return [(first[index], end[index]) for index in range(len(asked))]


# Moments that no step ends at, so that both ways agree on who came before it.
moments = st.integers(0, 400).map(lambda hundredths: hundredths * 0.0101 + 1.7e-5)


@given(
    st.lists(
        st.tuples(moments, st.integers(1, 5000), st.integers(1, 200)),
        min_size=1,
        max_size=12,
        # Of two requests at the same moment the second joins a step later.
        unique_by=lambda asked: asked[0],
    ),
    st.integers(1, 6),
)
def test_closed_form_runs_equal_single_steps(asked: list[tuple[float, int, int]], max_batch: int) -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, max_batch))
    requests = [make_request(context, tokens, moment) for moment, context, tokens in asked]
    for request in requests:
        bench.decode_at(request.arrival, request)
    bench.timeline.run()
    for request, (first, end) in zip(requests, step_by_step(asked, max_batch), strict=True):
        assert request.first_token == pytest.approx(first, abs=1e-7)
        assert request.decode_end == pytest.approx(end, abs=1e-7)
    assert num_gaps(requests) == sum(tokens - 1 for _, _, tokens in asked)


def test_a_prompt_alone_takes_its_prefill_time() -> None:
    bench = Bench(InstanceSpec(PREFILL, None))
    single = make_request(3000, 8)
    bench.prefill_at(1.0, Prefill(single, 2000, 1000, stays=False))
    bench.timeline.run()
    assert single.prefill_end - single.prefill_start == pytest.approx(PREFILL.seconds(2000, 1000))


def test_chunks_add_up_to_the_whole_prompt_and_a_fixed_part_each() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, chunk_tokens=512))
    single = make_request(2048, 8)
    bench.prefill_at(0.0, Prefill(single, 2048, 0, stays=False))
    bench.timeline.run()
    assert single.prefill_end == pytest.approx(PREFILL.seconds(2048) + 3 * 0.02)


def test_whole_prompt_delays_decode_more_than_a_chunk() -> None:
    def longest_gap(chunk_tokens: int | None) -> float:
        bench = Bench(InstanceSpec(PREFILL, DECODE, chunk_tokens=chunk_tokens))
        delayed = make_request(100, 200)
        bench.decode_at(0.0, delayed)
        bench.prefill_at(0.5, Prefill(make_request(8000, 1), 8000, 0, stays=True))
        bench.timeline.run()
        return delayed.gap_quantile(1.0)

    assert longest_gap(512) < 0.1 < 0.8 < longest_gap(None)


def test_small_prompts_share_a_chunk() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, chunk_tokens=1000))
    requests = [make_request(100, 1) for _ in range(5)]
    for request in requests:
        bench.prefill_at(0.0, Prefill(request, 100, 0, stays=True))
    bench.timeline.run()
    assert len({request.prefill_end for request in requests[1:]}) == 1


def test_kv_memory_limits_the_decode_batch() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, kv_tokens=2500))
    requests = [make_request(1000, 100) for _ in range(4)]
    for request in requests:
        bench.decode_at(0.0, request)
    bench.timeline.run()
    first, second, third, fourth = requests
    assert second.decode_start < first.decode_end
    assert third.decode_start == first.decode_end
    assert fourth.decode_start == second.decode_end


def test_request_larger_than_memory_runs_alone() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, kv_tokens=500))
    bench.decode_at(0.0, make_request(1000, 10))
    bench.timeline.run()
    assert len(bench.ended) == 1


def test_preempted_request_is_computed_again_and_continues() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, kv_tokens=2100))
    first, second = make_request(1000, 100), make_request(1000, 100)
    for request in (first, second):
        bench.decode_at(0.0, request)
    bench.timeline.run()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    # The requests hold 1,050 and 1,049 tokens when two more do not fit.
    recomputed = PREFILL.seconds(1049)
    # The prefill gives one of the 51 tokens that are left.
    alone = sum(DECODE.step_seconds(1, 1049 + step) for step in range(50))
    assert second.decode_end == pytest.approx(first.decode_end + recomputed + alone)
    # The two first tokens follow no gap.
    assert num_gaps([first, second]) == 198


def test_a_preempted_prompt_is_first_in_the_queue() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, kv_tokens=2100))
    first, second, later = make_request(1000, 100), make_request(1000, 100), make_request(100, 10)
    for request in (first, second):
        bench.decode_at(0.0, request)
    bench.prefill_at(2.0, Prefill(later, 100, 0, stays=True))  # second has given up by then
    bench.timeline.run()
    assert second.num_preemptions == 1
    assert later.prefill_start >= first.decode_end


@given(
    st.lists(st.tuples(moments, st.integers(1, 900), st.integers(1, 200), st.booleans()), min_size=1, max_size=10),
    st.integers(1, 6),
    st.sampled_from([None, 256]),
)
def test_every_preempted_request_gets_all_tokens(
    asked: list[tuple[float, int, int, bool]], max_batch: int, chunk_tokens: int | None
) -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, max_batch, 1200, chunk_tokens))
    requests = [make_request(context, tokens, moment) for moment, context, tokens, _ in asked]
    for request, (_, _, _, is_local) in zip(requests, asked, strict=True):
        if is_local:
            bench.prefill_at(request.arrival, Prefill(request, request.num_prompt_tokens, 0, stays=True))
        else:
            bench.decode_at(request.arrival, request)
    bench.timeline.run()
    assert sorted(map(id, bench.ended)) == sorted(map(id, requests))
    assert num_gaps(requests) == sum(tokens - 1 for _, _, tokens, _ in asked)


def test_prefill_makes_the_first_token_of_a_local_request() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE))
    single = make_request(1000, 3)
    bench.prefill_at(0.0, Prefill(single, 1000, 0, stays=True))
    bench.timeline.run()
    assert single.first_token == pytest.approx(PREFILL.seconds(1000))
    assert single.decode_end == pytest.approx(
        single.first_token + DECODE.step_seconds(1, 1000) + DECODE.step_seconds(1, 1001)
    )


def test_gaps_of_a_request_are_its_decode_steps() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE))
    early, late = make_request(100, 300), make_request(100, 50)
    bench.decode_at(0.0, early)
    bench.decode_at(1.0, late)
    bench.prefill_at(2.0, Prefill(make_request(8000, 1), 8000, 0, stays=True))
    bench.timeline.run()
    assert late.decode_end < 2.0
    assert late.gap_quantile(1.0) < 0.02 < PREFILL.seconds(8000) < early.gap_quantile(1.0)
    # Only one gap of three hundred is long.
    assert early.gap_quantile(0.95) < 0.02


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_first_step_of_a_transferred_request_is_no_gap(num_tokens: int) -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, load_seconds=0.5))
    single = make_request(100, num_tokens)
    bench.decode_at(0.0, single)
    bench.timeline.run()
    assert single.first_token - single.decode_start > 0.5
    assert single.gap_quantile(1.0) < 0.02
    assert num_gaps([single]) == num_tokens - 1
