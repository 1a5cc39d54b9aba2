"""Engines iterate as continuous batching does: the closed form of decode runs equals step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.model.cost.curve import polynomial
from prfaas.model.cost.profile import DecodeProfile, PrefillProfile
from prfaas.sim.kernel.meter import TokenGaps
from prfaas.sim.kernel.timeline import Timeline
from prfaas.sim.model.engine import Callbacks, InstanceSpec, Prefill, SimulatedInstance
from prfaas.sim.model.request import SimulatedRequest

PREFILL = PrefillProfile(polynomial(0.02, 1e-4, 1e-9), 1, 1e9)
DECODE = DecodeProfile(0.01, 1e-3, 1e-6)


class Bench:
    """One engine with nothing around it."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.timeline = Timeline()
        self.gaps = TokenGaps()
        self.last_chunks: list[float] = []
        self.ended: list[SimulatedRequest] = []
        callbacks = Callbacks(lambda _, seconds: self.last_chunks.append(seconds), lambda _: None, self.ended.append)
        self.instance = SimulatedInstance(self.timeline, spec, callbacks, self.gaps)

    def decode_at(self, moment: float, request: SimulatedRequest) -> None:
        self.timeline.at(moment, self.instance.decode, request)

    def prefill_at(self, moment: float, prefill: Prefill) -> None:
        self.timeline.at(moment, self.instance.prefill, prefill)


def request(prompt: int, output: int, arrival: float = 0.0) -> SimulatedRequest:
    return SimulatedRequest(0, arrival, prompt_tokens=prompt, output_tokens=output)


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
        unique_by=lambda one: one[0],  # of two at the same moment the second one joins a step later
    ),
    st.integers(1, 6),
)
def test_runs_in_closed_form_end_when_single_steps_do(asked: list[tuple[float, int, int]], max_batch: int) -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, max_batch))
    requests = [request(context, tokens, moment) for moment, context, tokens in asked]
    for one in requests:
        bench.decode_at(one.arrival, one)
    bench.timeline.run()
    for one, (first, end) in zip(requests, step_by_step(asked, max_batch), strict=True):
        assert one.first_token == pytest.approx(first, abs=1e-7)
        assert one.decode_end == pytest.approx(end, abs=1e-7)
    assert bench.gaps.arrays()[1].sum() == sum(tokens - 1 for _, _, tokens in asked)


def test_a_run_without_arrivals_is_one_event() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE))
    bench.decode_at(0.0, request(1000, 10_000))
    bench.timeline.run()
    assert bench.timeline.num_events == 2


def test_a_prompt_alone_takes_its_prefill_time() -> None:
    bench = Bench(InstanceSpec(PREFILL, None))
    one = request(3000, 8)
    bench.prefill_at(1.0, Prefill(one, 2000, 1000, stays=False))
    bench.timeline.run()
    assert one.prefill_end - one.prefill_start == pytest.approx(PREFILL.seconds(2000, 1000))


def test_chunks_add_up_to_the_whole_prompt_and_a_fixed_part_each() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, chunk_tokens=512))
    one = request(2048, 8)
    bench.prefill_at(0.0, Prefill(one, 2048, 0, stays=False))
    bench.timeline.run()
    assert one.prefill_end == pytest.approx(PREFILL.seconds(2048) + 3 * 0.02)


def test_a_whole_prompt_holds_up_decode_and_a_chunk_less_so() -> None:
    def longest_gap(chunk_tokens: int | None) -> float:
        bench = Bench(InstanceSpec(PREFILL, DECODE, chunk_tokens=chunk_tokens))
        bench.decode_at(0.0, request(100, 200))
        bench.prefill_at(0.5, Prefill(request(8000, 1), 8000, 0, stays=True))
        bench.timeline.run()
        return float(bench.gaps.arrays()[0].max())

    assert longest_gap(512) < 0.1 < 0.8 < longest_gap(None)


def test_small_prompts_share_a_chunk() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, chunk_tokens=1000))
    requests = [request(100, 1) for _ in range(5)]
    for one in requests:
        bench.prefill_at(0.0, Prefill(one, 100, 0, stays=True))
    bench.timeline.run()
    assert len({one.prefill_end for one in requests[1:]}) == 1


def test_no_more_than_memory_holds_decode_at_once() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, kv_tokens=2500))
    requests = [request(1000, 100) for _ in range(4)]
    for one in requests:
        bench.decode_at(0.0, one)
    bench.timeline.run()
    first, second, third, fourth = requests
    assert second.decode_start < first.decode_end
    assert third.decode_start == first.decode_end
    assert fourth.decode_start == second.decode_end


def test_a_request_larger_than_memory_runs_alone_and_not_never() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, kv_tokens=500))
    bench.decode_at(0.0, request(1000, 10))
    bench.timeline.run()
    assert len(bench.ended) == 1


def test_when_memory_is_full_who_joined_last_computes_everything_again_and_goes_on() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, kv_tokens=2100, preempts=True))
    first, second = request(1000, 100), request(1000, 100)
    for one in (first, second):
        bench.decode_at(0.0, one)
    bench.timeline.run()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    recomputed = PREFILL.seconds(1049)  # they hold 1,050 and 1,049 when two more do not fit
    alone = sum(DECODE.step_seconds(1, 1049 + step) for step in range(50))  # the prefill gave one of the 51 left
    assert second.decode_end == pytest.approx(first.decode_end + recomputed + alone)
    assert bench.gaps.arrays()[1].sum() == 198  # the two first tokens follow no other


def test_a_preempted_prompt_is_first_in_the_queue() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, kv_tokens=2100, preempts=True))
    first, second, later = request(1000, 100), request(1000, 100), request(100, 10)
    for one in (first, second):
        bench.decode_at(0.0, one)
    bench.prefill_at(2.0, Prefill(later, 100, 0, stays=True))  # second has given up by then
    bench.timeline.run()
    assert second.num_preemptions == 1
    assert later.prefill_start >= first.decode_end


@given(
    st.lists(st.tuples(moments, st.integers(1, 900), st.integers(1, 200), st.booleans()), min_size=1, max_size=10),
    st.integers(1, 6),
    st.sampled_from([None, 256]),
)
def test_under_preemption_everybody_ends_with_all_tokens(
    asked: list[tuple[float, int, int, bool]], max_batch: int, chunk_tokens: int | None
) -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, max_batch, 1200, chunk_tokens, preempts=True))
    requests = [request(context, tokens, moment) for moment, context, tokens, _ in asked]
    for one, (_, _, _, is_local) in zip(requests, asked, strict=True):
        if is_local:
            bench.prefill_at(one.arrival, Prefill(one, one.num_prompt_tokens, 0, stays=True))
        else:
            bench.decode_at(one.arrival, one)
    bench.timeline.run()
    assert sorted(map(id, bench.ended)) == sorted(map(id, requests))
    assert bench.gaps.arrays()[1].sum() == sum(tokens - 1 for _, _, tokens, _ in asked)


def test_a_local_requests_first_token_is_its_prefills_and_the_others_follow_one_by_one() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE))
    one = request(1000, 3)
    bench.prefill_at(0.0, Prefill(one, 1000, 0, stays=True))
    bench.timeline.run()
    assert one.first_token == pytest.approx(PREFILL.seconds(1000))
    assert one.decode_end == pytest.approx(
        one.first_token + DECODE.step_seconds(1, 1000) + DECODE.step_seconds(1, 1001)
    )


def test_a_requests_own_gaps_are_those_of_the_steps_it_was_in() -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE))
    early, late = request(100, 300), request(100, 50)
    bench.decode_at(0.0, early)
    bench.decode_at(1.0, late)
    bench.prefill_at(2.0, Prefill(request(8000, 1), 8000, 0, stays=True))
    bench.timeline.run()
    assert late.decode_end < 2.0
    assert late.gap_quantile(1.0) < 0.02 < PREFILL.seconds(8000) < early.gap_quantile(1.0)
    assert early.gap_quantile(0.95) < 0.02  # one gap of three hundred


@given(
    st.lists(
        st.tuples(moments, st.integers(1, 900), st.integers(2, 80)),
        min_size=1,
        max_size=8,
        unique_by=lambda one: one[0],
    )
)
def test_the_gaps_of_all_requests_are_those_of_the_run(asked: list[tuple[float, int, int]]) -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, 4, 1200, preempts=True))
    requests = [request(context, tokens, moment) for moment, context, tokens in asked]
    for one in requests:
        bench.decode_at(one.arrival, one)
    bench.timeline.run()
    own = [log.between(first, last) for one in requests for log, first, last in one.decoded if last > first]
    stalls = sum(stall for one in requests for stall in one.stalls)
    seconds, tokens = bench.gaps.arrays()
    num_own = sum(count.sum() for _, count in own) + sum(len(one.stalls) for one in requests)
    assert num_own == tokens.sum()
    assert sum(its @ count for its, count in own) + stalls == pytest.approx(seconds @ tokens)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_the_step_that_makes_a_transferred_requests_first_token_is_no_gap(num_tokens: int) -> None:
    bench = Bench(InstanceSpec(PREFILL, DECODE, load_seconds=0.5))
    one = request(100, num_tokens)
    bench.decode_at(0.0, one)
    bench.timeline.run()
    assert one.first_token - one.decode_start > 0.5
    assert one.gap_quantile(1.0) < 0.02
    seconds, tokens = bench.gaps.arrays()
    assert tokens.sum() == num_tokens - 1
    assert max(seconds, default=0.0) < 0.02
