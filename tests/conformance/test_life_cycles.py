"""Life cycles that vLLM's own tests of connectors describe, with this connector under vLLM's scheduler.

These tests of vLLM 0.32 do not apply:

- synchronous loads, invalid block ids, `test_cache_pollution_prevention`: loads are asynchronous, and a failed load
  names its request;
- `test_p_side_chunked_prefill_mamba`: the router leaves the last token out;
- `test_async_load_does_not_double_reserve_mamba_spec_blocks`: it is about vLLM's own classes;
- `test_connector_receives_block_hashes`, `test_connector_block_state_resolves_only_offered_requests`, output aggregator,
  hand-shakes, MultiConnector, HMA: only vLLM's own classes;
- `test_kv_connector_mixin_clears_metadata`: of Model Runner V1; end-to-end tests run it;
- `test_bidirectional_kv_transfer`, other connectors: NIXL's and others' own protocols.
"""

import pytest
from vllm.v1.request import RequestStatus

from tests.support.agent_nodes import prompt_of
from tests.support.paused_process import paused
from tests.support.scheduled_engine import BLOCK_TOKENS, ScheduledEngine
from tests.support.scheduled_engines import ScheduledEngines
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm
LENGTH = 81  # Two blocks and a half, and the last token, which the decode side computes.
LOADS, WAITS = RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING


def _is_right(engine: ScheduledEngine) -> bool:
    return engine.told.wrong_blocks == [] and set(engine.told.finished.values()) == {"length"}


# The prefill side


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_prefill_leg_keeps_its_blocks_until_they_are_copied(engines: ScheduledEngines, is_aborted: bool) -> None:
    prefiller, decoder = engines.prefiller("dense", device_type="cuda"), engines.decoder("dense")
    prompt = prompt_of(1, LENGTH)
    grant = engines.grant(prompt)
    decoding, prefilling = decoder.receive(prompt, grant), prefiller.send(prompt, grant)
    with prefiller.copies_held():
        engines.run_until_finished([prefilling], stepping=[prefiller])
        assert prefiller.told.finished == {prefilling: "length"}
        assert (prefiller.told.answers[prefilling] or {})["prfaas_sent"] == "completed"
        assert prefiller.num_free_blocks == prefiller.num_blocks - 1 - 3
        if is_aborted:
            prefiller.abort(prefilling)
        assert prefiller.num_free_blocks == prefiller.num_blocks - 1 - 3
    engines.run_until_finished([decoding])
    assert decoder.told.resumed_at == {decoding: LENGTH - 1} and _is_right(decoder)
    engines.assert_nothing_is_left()


def test_a_prompt_shorter_than_a_block_is_transferred(engines: ScheduledEngines) -> None:
    prefiller, decoder = engines.prefiller("dense"), engines.decoder("dense")
    decoding = engines.deliver(prefiller, decoder, prompt_of(2, BLOCK_TOKENS // 2 + 1))
    engines.run_until_finished([decoding])
    assert decoder.told.resumed_at == {decoding: BLOCK_TOKENS // 2} and _is_right(decoder)
    engines.assert_nothing_is_left()


def test_a_prefill_leg_sends_blocks_that_vllm_had_cached(engines: ScheduledEngines) -> None:
    prefiller, decoder = engines.prefiller("dense", caches_prefixes=True), engines.decoder("dense")
    prefiller.submit("before", prompt_of(3, 120), {}, answer_tokens=1)
    engines.run_until_finished(["before"])
    decoding = engines.deliver(prefiller, decoder, prompt_of(3, LENGTH))
    engines.run_until_finished([decoding])
    assert prefiller.told.resumed_at["p3"] == 64
    assert decoder.told.resumed_at == {decoding: LENGTH - 1} and _is_right(decoder)
    engines.assert_nothing_is_left()


def test_steps_that_allocate_no_block_still_save_what_they_fill(engines: ScheduledEngines) -> None:
    prefiller, decoder = engines.prefiller("dense", chunk_tokens=BLOCK_TOKENS // 2), engines.decoder("dense")
    decoding = engines.deliver(prefiller, decoder, prompt_of(4, LENGTH))
    engines.run_until_finished([decoding])
    assert decoder.told.resumed_at == {decoding: LENGTH - 1} and _is_right(decoder)
    engines.assert_nothing_is_left()


# The decode side


def test_a_decode_leg_waits_without_blocks_then_loads_then_computes_one_token(engines: ScheduledEngines) -> None:
    prefiller, decoder = engines.prefiller("dense"), engines.decoder("dense", caches_prefixes=True)
    prompt = prompt_of(5, LENGTH)
    grant = engines.grant(prompt)
    decoding = decoder.receive(prompt, grant)
    assert [decoder.step(), decoder.num_awaiting_kv("waiting_to_start")] == [0, 1]
    assert decoder.status(decoding) == WAITS and not decoder.holds_blocks(decoding)
    engines.run_until_finished([prefiller.send(prompt, grant)], stepping=[prefiller])
    wait_until(lambda: decoder.step() == 0 and decoder.status(decoding) == LOADS, what="the load")
    assert (decoder.num_awaiting_kv("completed_waiting"), decoder.num_hashed_blocks(decoding)) == (1, 0)
    assert [decoder.step(), decoder.num_awaiting_kv("completed_waiting")] == [1, 0]
    assert decoder.status(decoding) == RequestStatus.RUNNING and decoder.num_hashed_blocks(decoding) == 2
    engines.run_until_finished([decoding])
    engines.assert_nothing_is_left()


def test_other_requests_run_beside_one_that_waits(engines: ScheduledEngines) -> None:
    prefiller, decoder = engines.prefiller("dense"), engines.decoder("dense", chunk_tokens=256)
    prompt = prompt_of(6, LENGTH)
    grant = engines.grant(prompt)
    decoder.submit("first", prompt_of(7, LENGTH), {}, answer_tokens=20)
    assert decoder.step() == LENGTH
    decoder.submit("second", prompt_of(8, LENGTH), {}, answer_tokens=20)
    decoding = decoder.receive(prompt, grant)
    assert [decoder.step(), decoder.step()] == [LENGTH + 1, 2]
    engines.run_until_finished([prefiller.send(prompt, grant)], stepping=[prefiller])
    steps = [2]
    wait_until(lambda: steps.append(decoder.step()) or steps[-1] == 3, what="the load")  # type: ignore[func-returns-value]
    assert set(steps) == {2, 3}
    engines.run_until_finished(["first", "second", decoding])
    assert decoder.told.resumed_at[decoding] == LENGTH - 1 and _is_right(decoder)
    engines.assert_nothing_is_left()


def test_blocks_that_are_being_loaded_are_no_cached_prefix(engines: ScheduledEngines) -> None:
    prefiller, decoder = engines.prefiller("dense"), engines.decoder("dense", caches_prefixes=True)
    decoding = engines.deliver(prefiller, decoder, prompt_of(9, LENGTH))
    decoder.submit("same", prompt_of(9, LENGTH), {}, answer_tokens=2)
    engines.run_until_finished([decoding, "same"])
    assert decoder.told.resumed_at == {decoding: LENGTH - 1, "same": 0} and _is_right(decoder)
    engines.assert_nothing_is_left()


def test_the_last_token_of_a_prompt_of_full_blocks_needs_no_further_block(engines: ScheduledEngines) -> None:
    prefiller, decoder = engines.prefiller("dense"), engines.decoder("dense")
    decoding = engines.deliver(prefiller, decoder, prompt_of(10, 2 * BLOCK_TOKENS))
    for _ in range(2):
        decoder.step()
        assert decoder.num_free_blocks == decoder.num_blocks - 1 - 2
    engines.run_until_finished([decoding])
    assert decoder.told.resumed_at == {decoding: 2 * BLOCK_TOKENS - 1} and _is_right(decoder)
    engines.assert_nothing_is_left()


def test_a_loaded_request_without_room_for_its_answer_is_preempted_and_ends_later(engines: ScheduledEngines) -> None:
    prefiller, decoder = engines.prefiller("dense"), engines.decoder("dense", num_blocks=6)
    decoder.submit("local", prompt_of(11, 2 * BLOCK_TOKENS), {}, answer_tokens=20)
    wait_until(lambda: decoder.step() == 1, what="an answer that has begun")
    decoding = engines.deliver(prefiller, decoder, prompt_of(12, 2 * BLOCK_TOKENS))
    engines.run_until_finished(["local", decoding])
    assert (decoder.num_preemptions("local"), decoder.num_preemptions(decoding)) == (0, 1)
    assert decoder.told.resumed_at[decoding] == 2 * BLOCK_TOKENS - 1 and _is_right(decoder)
    engines.assert_nothing_is_left()


def test_kv_that_finds_no_room_is_loaded_once_there_is_room(engines: ScheduledEngines) -> None:
    prefiller, decoder = engines.prefiller("dense"), engines.decoder("dense", num_blocks=6)
    decoder.submit("local", prompt_of(13, 2 * BLOCK_TOKENS), {}, answer_tokens=20)
    wait_until(lambda: decoder.step() == 1, what="an answer that has begun")
    decoding = engines.deliver(prefiller, decoder, prompt_of(14, LENGTH))
    while "local" not in decoder.told.finished:
        assert decoder.status(decoding) == WAITS and not decoder.holds_blocks(decoding)
        decoder.step()
    engines.run_until_finished([decoding])
    assert decoder.told.resumed_at[decoding] == LENGTH - 1 and _is_right(decoder)
    engines.assert_nothing_is_left()


@pytest.mark.parametrize("is_here", [False, True])
def test_an_aborted_request_awaits_no_kv(engines: ScheduledEngines, is_here: bool) -> None:
    prefiller, decoder = engines.prefiller("dense"), engines.decoder("dense")
    prompt = prompt_of(15, LENGTH)
    decoding = (
        engines.deliver(prefiller, decoder, prompt) if is_here else decoder.receive(prompt, engines.grant(prompt))
    )
    decoder.step()
    decoder.abort(decoding)
    stages = ("waiting_to_start", "in_progress", "completed_waiting")
    assert [decoder.num_awaiting_kv(stage) for stage in stages] == [0, 0, 0]
    engines.assert_nothing_is_left()


# Several loads at once


def _two_prefixes(engines: ScheduledEngines, *, num_blocks: int) -> tuple[ScheduledEngine, list[str]]:
    """Return an engine and two requests, of 4 and 5 blocks, of which the pool holds the first 1 and 4 blocks."""
    engine = engines.decoder("dense", num_blocks=num_blocks, reuse=True, reuse_min_tokens=16)
    prompts = {"short": prompt_of(16, 4 * BLOCK_TOKENS), "long": prompt_of(17, 5 * BLOCK_TOKENS)}
    for name, held in (("short", 1), ("long", 4)):
        engine.submit(f"before {name}", prompts[name][: held * BLOCK_TOKENS], {}, answer_tokens=1)
        engines.run_until_finished([f"before {name}"])
    wait_until(lambda: engine.step() >= 0 and not engine.leftovers(), what="the blocks in the pool")
    for name, prompt in prompts.items():
        engine.submit(name, prompt, {}, answer_tokens=1)
        engine.await_offer(name)
    return engine, list(prompts)


def test_a_load_leaves_the_blocks_that_an_earlier_load_will_need(engines: ScheduledEngines) -> None:
    engine, names = _two_prefixes(engines, num_blocks=8)
    engine.step()
    assert [engine.status(name) for name in names] == [LOADS, WAITS] and not engine.holds_blocks("long")
    engines.run_until_finished(names)
    assert _is_right(engine)
    engines.assert_nothing_is_left()


def test_loads_run_together_where_there_is_room(engines: ScheduledEngines) -> None:
    engine, names = _two_prefixes(engines, num_blocks=64)
    engine.step()
    assert [engine.status(name) for name in names] == [LOADS, LOADS]
    engines.run_until_finished(names)
    assert _is_right(engine)
    engines.assert_nothing_is_left()


@pytest.mark.parametrize(("shape", "num_blocks"), [("dense", 8), ("windowed", 16), ("short windows", 12)])
def test_two_loads_never_leave_either_without_room_for_its_drafts(
    engines: ScheduledEngines, shape: str, num_blocks: int
) -> None:
    prefiller, decoder = engines.prefiller(shape), engines.decoder(shape, num_blocks=num_blocks, num_drafts=3)
    ids = [
        engines.deliver(prefiller, decoder, prompt_of(seed, num_tokens))
        for seed, num_tokens in ((18, 4 * BLOCK_TOKENS), (19, 3 * BLOCK_TOKENS))
    ]
    decoder.step()
    assert [decoder.status(request_id) for request_id in ids] == [LOADS, WAITS]
    engines.run_until_finished(ids)
    assert decoder.told.resumed_at == {ids[0]: 4 * BLOCK_TOKENS - 1, ids[1]: 3 * BLOCK_TOKENS - 1}
    assert _is_right(decoder)
    engines.assert_nothing_is_left()


def test_a_lookup_without_an_answer_does_not_hold_up_a_later_load(engines: ScheduledEngines) -> None:
    prefiller = engines.prefiller("dense")
    decoder = engines.decoder("dense", num_blocks=8, reuse=True, reuse_min_tokens=BLOCK_TOKENS * 4)
    with paused(engines.nodes.west.child.process.pid):
        decoder.submit("asks", prompt_of(20, 4 * BLOCK_TOKENS), {}, answer_tokens=1)
        decoder.step()
        assert decoder.status("asks") == WAITS
    decoding = engines.deliver(prefiller, decoder, prompt_of(21, 3 * BLOCK_TOKENS))
    engines.run_until_finished(["asks", decoding])
    assert decoder.told.resumed_at[decoding] == 3 * BLOCK_TOKENS - 1 and _is_right(decoder)
    engines.assert_nothing_is_left()


# Failed loads


def test_a_failed_load_fails_no_other_and_its_blocks_are_no_cached_prefix(engines: ScheduledEngines) -> None:
    prefiller, decoder = engines.prefiller("dense"), engines.decoder("dense", caches_prefixes=True)
    lost, kept = (engines.deliver(prefiller, decoder, prompt_of(seed, LENGTH)) for seed in (22, 23))
    decoder.reuse_slot(lost)
    engines.run_until_finished([lost, kept])
    decoder.submit("same", prompt_of(22, LENGTH), {}, answer_tokens=2)
    engines.run_until_finished(["same"])
    assert decoder.told.resumed_at[kept] == LENGTH - 1 and _is_right(decoder)
    engines.assert_nothing_is_left()
    assert decoder.told.outcomes == {"receive overwritten": 1, "receive completed": 1}
