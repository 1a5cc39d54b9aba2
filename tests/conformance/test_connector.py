"""The connector under vLLM's own scheduler: whole lives of requests in the documented order of calls, without a model."""

import itertools
import math
import os
import select
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import prfaas
from prfaas.agent.links import ORDINARY
from prfaas.connector.scheduler.prefill_rate import UNKNOWN_TOKENS_PER_SECOND
from prfaas.types import TransferId
from tests.support.agent_nodes import prompt_of
from tests.support.scheduled_engine import ANSWER_TOKEN, BLOCK_TOKENS, END_TOKEN
from tests.support.scheduled_engines import SHAPES, ScheduledEngines
from tests.support.vllm_caches import caches_of, config_of
from tests.support.waiting import wait_until
from tools.demo.client import get_json

pytestmark = pytest.mark.vllm
LENGTH = 301  # Neither whole blocks nor whole chunks of a prompt travel.
_numbers = itertools.count(1)
REUSES_SHORT_ONES = {"reuse": True, "reuse_min_tokens": 16}
# Functions of these packages count as calls of a step without transfers.
COUNTED = tuple(str(Path(prfaas.__file__).parent / name) for name in ("connector", "agent"))
MAX_CALLS = 40


@pytest.mark.parametrize("shape", ["dense", "windowed", "short windows", "chunked", "recurrent"])
def test_only_the_last_token_of_a_transferred_prompt_is_computed(engines: ScheduledEngines, shape: str) -> None:
    prefiller, decoder = engines.prefiller(shape), engines.decoder(shape)
    prompt = prompt_of(1, LENGTH)
    grant = engines.grant(prompt)
    ids = [decoder.receive(prompt, grant), prefiller.send(prompt, grant)]
    engines.run_until_finished(ids)
    assert decoder.told.resumed_at == {"d1": LENGTH - 1}
    assert decoder.told.wrong_blocks == prefiller.told.wrong_blocks == []
    assert decoder.told.finished == {"d1": "length"}
    assert (prefiller.told.outcomes, decoder.told.outcomes) == ({"send completed": 1}, {"receive completed": 1})
    engines.assert_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("shape", ["windowed", "checkpointed"])
def test_blocks_stay_allocated_until_they_are_copied(engines: ScheduledEngines, shape: str, asynchronous: bool) -> None:
    """On a GPU copies run beside later steps, which must not overwrite their blocks."""
    settings = {"device_type": "cuda", "asynchronous": asynchronous}
    prefiller = engines.prefiller(shape, num_blocks=56, caches_prefixes=shape == "checkpointed", **settings)
    decoder = engines.decoder(shape)
    prompt = prompt_of(41, LENGTH)
    grant = engines.grant(prompt)
    with prefiller.copies_held():
        ids = [decoder.receive(prompt, grant), prefiller.send(prompt, grant)]
        engines.run_until_finished(ids[1:])
        wait_until(lambda: prefiller.step() >= 0 and prefiller.num_awaiting_copies > 2, what="the copies")
        for number in range(20):  # They take every block that is free.
            prefiller.submit(f"other {number}", prompt_of(50 + number, 120), {}, answer_tokens=1)
            engines.run_until_finished([f"other {number}"])
        assert prefiller.has_work, "vLLM must step to hear of the copies"
    engines.run_until_finished(ids)
    assert decoder.told.wrong_blocks == []
    engines.assert_nothing_is_left()


def test_vllms_own_counters_stay_true(engines: ScheduledEngines) -> None:
    """Requests that await KV, the source of loaded tokens, and what the prefill engine had cached."""
    prefiller, decoder = engines.prefiller("dense", caches_prefixes=True), engines.decoder("dense", reuse=True)
    prefiller.submit("before", prompt_of(39, 200), {}, answer_tokens=1)
    engines.run_until_finished(["before"])
    prompt = prompt_of(39, LENGTH)
    grant = engines.grant(prompt)
    decoding = decoder.receive(prompt, grant)
    assert decoder.num_awaiting_kv("waiting_to_start") == 1
    prefilling = prefiller.send(prompt, grant)
    engines.run_until_finished([decoding, prefilling])
    engines.assert_nothing_is_left()
    assert prefiller.told.answers[prefilling] == {
        "prfaas_sent": "completed",
        "do_remote_prefill": True,
        "remote_prefill_cached_tokens": 192,
    }
    decoder.submit("next turn", [*prompt, *prompt_of(40, 40)], {}, answer_tokens=1)
    engines.run_until_finished(["next turn"])
    assert decoder.told.loaded_tokens == {"p2p": LENGTH - 1, "host": 288}
    assert decoder.num_awaiting_kv("waiting_to_start") == decoder.num_awaiting_kv("in_progress") == 0


def test_changed_bytes_are_noticed(engines: ScheduledEngines) -> None:
    """Negative control: the west's pool is overwritten between arrival and load."""
    prefiller, decoder = engines.prefiller("recurrent"), engines.decoder("recurrent")
    prompt, before = prompt_of(2, LENGTH), engines.num_come()
    grant = engines.grant(prompt)
    decoding = decoder.receive(prompt, grant)
    prefiller.send(prompt, grant)
    wait_until(lambda: prefiller.step() >= 0 and engines.num_come() > before, what="the transfer")
    decoder.spoil_pool()
    engines.run_until_finished([decoding])
    assert {name for _, _, name, _ in decoder.told.wrong_blocks} == {"state.0", "state.1", "full.0"}


def test_requests_end_right_when_blocks_are_scarce(engines: ScheduledEngines) -> None:
    """Five requests of ten blocks share 23 blocks and grow while they decode, so vLLM preempts them."""
    prefiller, decoder = engines.prefiller("dense"), engines.decoder("dense", num_blocks=24)
    prompts = [prompt_of(seed, LENGTH) for seed in range(3, 8)]
    grants = [engines.grant(prompt) for prompt in prompts]
    ids = [decoder.receive(*leg, answer_tokens=60) for leg in zip(prompts, grants, strict=True)]
    ids += [prefiller.send(*leg) for leg in zip(prompts, grants, strict=True)]
    engines.run_until_finished(ids)
    assert set(decoder.told.finished.values()) == {"length"}
    assert decoder.told.wrong_blocks == []
    assert decoder.told.outcomes == {"receive completed": 5}
    engines.assert_nothing_is_left()


@pytest.mark.parametrize(("policy", "on_the_wire"), [("priority", ORDINARY - 2), ("fcfs", ORDINARY)])
def test_priority_applies_to_the_wire_if_vllm_schedules_by_priority(
    engines: ScheduledEngines, policy: str, on_the_wire: int
) -> None:
    prefiller, decoder = engines.prefiller("dense", policy=policy), engines.decoder("dense")
    prompt, transfer_id = prompt_of(21, LENGTH), TransferId(os.urandom(16))
    grant = engines.grant(prompt, transfer_id=transfer_id)
    engines.run_until_finished([decoder.receive(prompt, grant), prefiller.send(prompt, grant, priority=-2)])
    engines.assert_nothing_is_left()
    sent = get_json(f"{engines.nodes.east.status_url}/transfers")
    assert [transfer["priority"] for transfer in sent if transfer["transfer_id"] == transfer_id.hex()] == [on_the_wire]


def test_the_decode_side_computes_a_prompt_whose_prefill_is_aborted(engines: ScheduledEngines) -> None:
    prefiller, decoder = engines.prefiller("windowed"), engines.decoder("windowed")
    prompt = prompt_of(10, LENGTH)
    grant = engines.grant(prompt)
    decoding, prefilling = decoder.receive(prompt, grant), prefiller.send(prompt, grant)
    wait_until(prefiller.step, what="the first chunk")
    prefiller.abort(prefilling)
    engines.run_until_finished([decoding])
    assert decoder.told.resumed_at == {"d10": 0}
    assert decoder.told.wrong_blocks == []
    assert (prefiller.told.outcomes, decoder.told.outcomes) == ({"send aborted": 1}, {"receive incomplete": 1})
    engines.assert_nothing_is_left()


def test_a_prefill_leg_with_another_prompt_than_granted_sends_nothing(engines: ScheduledEngines) -> None:
    """The prompts differ behind the last full block, so no block hash tells them apart."""
    prefiller, decoder = engines.prefiller("dense"), engines.decoder("dense")
    prompt = prompt_of(37, LENGTH)
    grant = engines.grant(prompt)
    decoding, prefilling = decoder.receive(prompt, grant), prefiller.send([*prompt[:-2], 9999, 0], grant)
    engines.run_until_finished([prefilling])
    assert prefiller.told.outcomes == {"send prompt_mismatch": 1}
    decoder.abort(decoding)
    engines.assert_nothing_is_left()
    assert decoder.told.outcomes == {"receive aborted": 1}


@pytest.mark.parametrize(("policy", "ends"), [("recompute", "length"), ("fail", "error")])
def test_lost_kv_ends_as_the_load_failure_policy_says(engines: ScheduledEngines, policy: str, ends: str) -> None:
    prefiller, decoder = engines.prefiller("recurrent"), engines.decoder("recurrent", load_failure=policy)
    prompt = prompt_of(11, LENGTH)
    grant = engines.grant(prompt)
    decoding = decoder.receive(prompt, grant)
    engines.run_until_finished([prefiller.send(prompt, grant)], stepping=[prefiller])
    decoder.reuse_slot(decoding)
    engines.run_until_finished([decoding])
    assert decoder.told.finished == {decoding: ends}
    assert decoder.told.outcomes == {"receive overwritten": 1}
    assert decoder.told.wrong_blocks == []
    engines.assert_nothing_is_left()


def test_prefill_rate_counts_neither_short_prompts_nor_drafts(engines: ScheduledEngines) -> None:
    engine = engines.decoder("dense", num_drafts=15, chunk_tokens=200)
    rate = engine.scheduler.connector._scheduler.prefill_rate
    ids = [f"short {number}" for number in range(8)]
    for seed, request_id in enumerate(ids):
        engine.submit(request_id, prompt_of(seed, 7), {}, answer_tokens=40)
    engines.run_until_finished(ids)
    assert rate.tokens_per_second == UNKNOWN_TOKENS_PER_SECOND
    engine.submit("long", prompt_of(46, LENGTH), {}, answer_tokens=1)
    engines.run_until_finished(["long"])
    assert rate.tokens_per_second != UNKNOWN_TOKENS_PER_SECOND


def test_a_step_without_transfers_costs_few_calls_and_no_message(
    engines: ScheduledEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of functions are counted, since times depend on the machine."""
    decoder = engines.decoder("dense")
    connector = decoder.scheduler.connector
    for seed in (23, 24, 25):
        decoder.submit(f"r{seed}", prompt_of(seed, LENGTH), {}, answer_tokens=60)
    wait_until(lambda: decoder.step() == 3, what="a step that decodes all three")
    monkeypatch.setattr(connector._scheduler, "_poll_at", math.inf)
    called: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and isinstance(getattr(argument, "__self__", None), socket.socket | type(select.poll())):
            called["socket"] += 1
        elif event == "call" and frame.f_code.co_filename.startswith(COUNTED):
            called[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        metadata = [decoder.step() and connector._metadata for _ in range(10)]
    finally:
        sys.setprofile(None)
    assert called["socket"] == called["save_kv_layer"] == 0
    assert called.total() <= 10 * MAX_CALLS
    assert len(set(map(id, metadata))) == 1


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_idle_engine_sleeps_unless_other_ranks_wait_for_it(engines: ScheduledEngines, num_ranks: int) -> None:
    """Ranks of experts compute together, even without work of their own."""
    decoder = engines.decoder("dense", data_parallel_size=num_ranks)
    prompt = prompt_of(38, LENGTH)
    decoding = decoder.receive(prompt, engines.grant(prompt))
    decoder.step()
    num_sleeps = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_sleeps
        num_sleeps += event == "c_call" and isinstance(getattr(argument, "__self__", None), type(select.poll()))

    sys.setprofile(count)
    try:
        for _ in range(5):
            decoder.step()
    finally:
        sys.setprofile(None)
    assert (num_sleeps > 0) == (num_ranks == 1)
    decoder.abort(decoding)
    engines.assert_nothing_is_left()


def test_a_decode_leg_with_prompt_log_probabilities_releases_its_transfer(
    engines: ScheduledEngines,
) -> None:
    """vLLM takes nothing from a connector for it."""
    prefiller, decoder = engines.prefiller("dense"), engines.decoder("dense")
    prompt = prompt_of(22, LENGTH)
    grant = engines.grant(prompt, expires_at=time.time() + 3600.0)
    parameters = {"do_remote_prefill": True, "prfaas_grant": grant}
    decoder.submit("d22", prompt, parameters, answer_tokens=2, prompt_logprobs=1)
    engines.run_until_finished(["d22", prefiller.send(prompt, grant)])
    assert decoder.told.resumed_at == {"d22": 0}
    assert decoder.told.outcomes == {"receive whole_prompt": 1}
    engines.assert_nothing_is_left()


@pytest.mark.parametrize("direction", ["do_remote_prefill", "do_remote_decode"])
def test_other_connectors_see_no_direction_of_a_request_with_a_grant(engines: ScheduledEngines, direction: str) -> None:
    """NixlConnector under MultiConnector would take it for its own, and stop the engine if the transfer fails."""
    engine, prompt = engines.decoder("dense", **REUSES_SHORT_ONES), prompt_of(23, LENGTH)
    foreign = {direction: True, "remote_engine_id": "e"}
    engine.submit("ours", prompt, {direction: True, "prfaas_grant": "no grant", "more": 1}, answer_tokens=1)
    engine.submit("theirs", prompt, foreign, answer_tokens=1)
    assert "do_remote_decode" not in engine.parameters("ours"), "NixlConnector would shorten the prompt at once"
    engine.step()
    assert engine.parameters("ours") == {"prfaas_grant": "no grant", "more": 1}
    assert engine.parameters("theirs") == foreign
    engines.run_until_finished(["ours", "theirs"])
    is_prefill = direction == "do_remote_prefill"
    engines.assert_nothing_is_left()
    assert engine.told.outcomes == {
        f"{'receive' if is_prefill else 'send'} no_grant": 1,
        "reuse no_prefix": 1 if is_prefill else 2,  # No prefix of the pool replaces KV of another connector.
        "store completed": 2,
    }


def test_the_first_of_several_answers_takes_the_transfer(engines: ScheduledEngines) -> None:
    """With n = 2 vLLM makes two requests that differ only in their ids."""
    prefiller, decoder = engines.prefiller("recurrent"), engines.decoder("recurrent")
    prompt = prompt_of(15, LENGTH)
    grant = engines.grant(prompt)
    ids = [decoder.receive(prompt, grant, sample=sample) for sample in ("0_", "1_")]
    engines.run_until_finished([*ids, prefiller.send(prompt, grant)])
    assert decoder.told.resumed_at == {"0_d15": LENGTH - 1, "1_d15": 0}
    assert decoder.told.wrong_blocks == []
    assert decoder.told.outcomes == {"receive completed": 1, "receive in_use": 1}
    engines.assert_nothing_is_left()


def test_a_parked_request_skips_prefix_lookups_and_keeps_its_local_prefix(engines: ScheduledEngines) -> None:
    prefiller, decoder = engines.prefiller("dense"), engines.decoder("dense", caches_prefixes=True)
    decoder.submit("first", prompt_of(14, 200), {}, answer_tokens=1)
    engines.run_until_finished(["first"])
    prompt = prompt_of(14, LENGTH)
    grant = engines.grant(prompt)
    decoding = decoder.receive(prompt, grant)
    for _ in range(3):
        decoder.step()
        assert not decoder.is_looked_up(decoding)
    prefiller.send(prompt, grant)
    engines.run_until_finished([decoding])
    assert decoder.is_looked_up(decoding)
    assert decoder.told.resumed_at == {"first": 0, decoding: LENGTH - 1}
    assert decoder.told.wrong_blocks == []
    block_bytes = sum(cache[0].nbytes for cache in caches_of(config_of(*SHAPES["dense"], num_blocks=1)).values())
    assert decoder.told.copied_bytes["receive"] == 4 * block_bytes, "the engine holds six of ten blocks"
    engines.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("shape", "asynchronous", "num_reused"),
    [("dense", False, 288), ("dense", True, 320), ("recurrent", False, 319), ("recurrent", True, 320)],
)
def test_a_finished_answer_is_stored_for_the_next_turn(
    engines: ScheduledEngines, shape: str, asynchronous: bool, num_reused: int
) -> None:
    """With asynchronous scheduling the last token, the 320th, is computed before the scheduler hears of it."""
    engine = engines.decoder(shape, asynchronous=asynchronous, reuse=True)
    prompt = prompt_of(20, 313)
    engine.submit("first", prompt, {}, answer_tokens=7, ends_by_itself=True)
    engines.run_until_finished(["first"])
    engines.assert_nothing_is_left()
    assert engine.told.finished == {"first": "stop"}
    assert engine.told.outcomes["store completed"] == 1
    turn = [*prompt, *[ANSWER_TOKEN] * 6, END_TOKEN, *prompt_of(21, 40)]
    engine.submit("second", turn, {}, answer_tokens=2)
    engines.run_until_finished(["second"])
    assert engine.told.resumed_at["second"] == num_reused
    assert engine.told.wrong_blocks == []
    engines.assert_nothing_is_left()


@pytest.mark.parametrize("has_draft_model", [False, True])
@pytest.mark.parametrize(
    ("shape", "answer_tokens", "num_reused"),
    [
        ("dense", 7, 288),
        ("dense", 8, 320),
        ("windowed", 7, 288),
        ("windowed", 8, 320),
        ("windowed", 9, 320),
        ("short windows", 7, 256),
        ("short windows", 9, 320),
        ("short windows", 60, 320),
        # The state after the answer stands in the block of a draft, so that of the transferred prompt is the last.
        ("recurrent", 9, 312),
        ("checkpointed", 9, 312),
        ("checkpointed", 60, 312),
    ],
)
def test_answers_with_drafts_are_received_and_stored(
    engines: ScheduledEngines, shape: str, answer_tokens: int, num_reused: int, has_draft_model: bool
) -> None:
    """Each step accepts two of three drafts. Some answers end inside a draft, whose rest vLLM counts as computed."""
    has_states = shape in ("recurrent", "checkpointed")
    drafting = engines.drafting if has_draft_model else {"num_drafts": 3}
    prefiller = engines.prefiller(shape, **drafting if has_draft_model or has_states else {})
    decoder = engines.decoder(shape, reuse=True, **drafting)
    prompt = prompt_of(42, 313)
    grant = engines.grant(prompt)
    parameters = {"do_remote_prefill": True, "prfaas_grant": grant}
    decoder.submit("first", prompt, parameters, answer_tokens=answer_tokens, ends_by_itself=True)
    engines.run_until_finished(["first", prefiller.send(prompt, grant)])
    engines.assert_nothing_is_left()
    assert decoder.told.resumed_at["first"] == 312
    assert decoder.told.outcomes == {"receive completed": 1, **({} if has_states else {"store completed": 1})}
    turn = [*prompt, *[ANSWER_TOKEN] * (answer_tokens - 1), END_TOKEN, *prompt_of(43, 40)]
    decoder.submit("second", turn, {}, answer_tokens=12)
    engines.run_until_finished(["second"])
    assert decoder.told.resumed_at["second"] == num_reused
    assert decoder.told.wrong_blocks == []
    engines.assert_nothing_is_left()


@pytest.mark.parametrize("shape", ["dense", "windowed"])
@pytest.mark.parametrize(
    ("draft_kv", "outcome", "resumed_at"), [(False, "completed", LENGTH - 1), (True, "layout_mismatch", 0)]
)
def test_a_prompt_without_kv_of_drafts_is_taken_if_the_decode_side_leaves_its_own_out(
    engines: ScheduledEngines, shape: str, draft_kv: bool, outcome: str, resumed_at: int
) -> None:
    prefiller = engines.prefiller(shape)
    decoder = engines.decoder(shape, draft_kv=draft_kv, **engines.drafting)
    prompt = prompt_of(44, LENGTH)
    grant = engines.grant(prompt)
    decoding = decoder.receive(prompt, grant, answer_tokens=12)
    engines.run_until_finished([decoding, prefiller.send(prompt, grant)])
    assert decoder.told.outcomes == {f"receive {outcome}": 1}
    assert decoder.told.resumed_at == {decoding: resumed_at}
    assert {name for _, _, name, _ in decoder.told.wrong_blocks} == (set() if draft_kv else {"mtp.0"})
    engines.assert_nothing_is_left()


def test_no_request_is_preempted_while_a_finished_one_is_about_to_free_blocks(
    engines: ScheduledEngines,
) -> None:
    """One request has ten of 23 blocks and ends. In the same step another one, with thirteen, needs one more."""
    engine = engines.decoder("dense", num_blocks=24, reuse=True)
    prompt = prompt_of(26, 13 * BLOCK_TOKENS - 2)
    engine.submit("ends", prompt_of(25, LENGTH), {}, answer_tokens=18)
    engine.submit("grows", prompt, {}, answer_tokens=8)
    wait_until(lambda: engine.step() and engine.num_computed_tokens("grows") == len(prompt) + 1)
    engine.end_answer("ends")
    engine.step()
    assert (engine.told.finished, engine.num_free_blocks) == ({"ends": "stop"}, 0)
    engines.run_until_finished(["grows"])
    assert engine.num_preemptions("grows") == 0
    assert engine.told.wrong_blocks == []
    engines.assert_nothing_is_left()


def test_a_reset_of_vllms_caches_clears_the_pool(engines: ScheduledEngines) -> None:
    engine = engines.decoder("dense", reuse=True, caches_prefixes=True)

    def resumed_at(request_id: str) -> int:
        engine.submit(request_id, prompt_of(22, LENGTH), {}, answer_tokens=2)
        engines.run_until_finished([request_id])
        engines.assert_nothing_is_left()
        return engine.told.resumed_at[request_id]

    assert resumed_at("first") == 0
    assert engine.scheduler.reset_prefix_cache()
    assert resumed_at("from the pool") == 288
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert resumed_at("after") == 0
    assert engine.told.wrong_blocks == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reset_during_prefill_ends_the_transfer_and_both_sides_compute_again(
    engines: ScheduledEngines, asynchronous: bool
) -> None:
    prefiller, decoder = engines.prefiller("dense", asynchronous=asynchronous), engines.decoder("dense")
    prompt = prompt_of(23, LENGTH)
    grant = engines.grant(prompt)
    decoding, prefilling = decoder.receive(prompt, grant), prefiller.send(prompt, grant)
    wait_until(prefiller.step, what="the first chunk")
    assert prefiller.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engines.run_until_finished([decoding, prefilling])
    assert decoder.told.resumed_at == {decoding: 0}
    assert decoder.told.wrong_blocks == prefiller.told.wrong_blocks == []
    assert (prefiller.told.outcomes, decoder.told.outcomes) == ({"send reset": 1}, {"receive incomplete": 1})
    assert prefiller.told.answers[prefilling] == {"prfaas_sent": "reset"}
    engines.assert_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_preempted_prefill_still_sends_its_whole_prompt(engines: ScheduledEngines, asynchronous: bool) -> None:
    prefiller, decoder = engines.prefiller("recurrent", asynchronous=asynchronous), engines.decoder("recurrent")
    prompt = prompt_of(27, LENGTH)
    grant = engines.grant(prompt)
    decoding, prefilling = decoder.receive(prompt, grant), prefiller.send(prompt, grant)
    wait_until(prefiller.step, what="the first chunk")
    assert prefiller.scheduler.reset_prefix_cache(reset_running_requests=True)  # The only way to have vLLM preempt.
    engines.run_until_finished([decoding, prefilling])
    assert prefiller.num_preemptions(prefilling) == 1
    sent, loaded = prefiller.told.copied_bytes, decoder.told.copied_bytes
    assert sent["send"] == loaded["receive"], "no block is copied twice"
    assert decoder.told.resumed_at == {decoding: LENGTH - 1}
    assert decoder.told.wrong_blocks == prefiller.told.wrong_blocks == []
    assert (prefiller.told.outcomes, decoder.told.outcomes) == ({"send completed": 1}, {"receive completed": 1})
    engines.assert_nothing_is_left()


@pytest.mark.parametrize(("shape", "resumed_again_at"), [("dense", 288), ("recurrent", LENGTH - 1)])
def test_a_preempted_answer_reuses_its_prompt_from_the_pool(
    engines: ScheduledEngines, shape: str, resumed_again_at: int
) -> None:
    prefiller, decoder = engines.prefiller(shape), engines.decoder(shape, reuse=True)
    prompt = prompt_of(28, LENGTH)
    grant = engines.grant(prompt)
    decoding, prefilling = decoder.receive(prompt, grant, answer_tokens=8), prefiller.send(prompt, grant)
    engines.run_until_finished([prefilling])
    wait_until(lambda: decoder.step() >= 0 and decoder.num_computed_tokens(decoding) > LENGTH + 1)
    assert decoder.scheduler.reset_prefix_cache(reset_running_requests=True)
    engines.run_until_finished([decoding])
    assert decoder.told.resumed_at == {decoding: LENGTH - 1}
    assert decoder.told.resumed_again_at == {decoding: resumed_again_at}
    assert decoder.told.wrong_blocks == []
    engines.assert_nothing_is_left()
    assert decoder.told.outcomes == {"receive completed": 1, "reuse completed": 1, "store completed": 1}


def test_a_reset_during_a_transfer_makes_the_engine_compute_the_prompt(engines: ScheduledEngines) -> None:
    prefiller, decoder = engines.prefiller("recurrent"), engines.decoder("recurrent")
    prompt = prompt_of(24, LENGTH)
    grant = engines.grant(prompt)
    decoding, prefilling = decoder.receive(prompt, grant), prefiller.send(prompt, grant)
    decoder.step()
    assert decoder.scheduler.reset_prefix_cache(reset_connector=True)
    engines.run_until_finished([decoding, prefilling])
    assert decoder.told.resumed_at == {decoding: 0}
    assert decoder.told.wrong_blocks == []
    assert decoder.told.outcomes == {"receive reset": 1}
    engines.assert_nothing_is_left()


def _bytes_of(shape: str) -> tuple[int, int]:
    """Return the bytes of all states, and of a block of full attention."""
    caches = caches_of(config_of(*SHAPES[shape], num_blocks=1))
    by_kind = [
        sum(cache.nbytes for name, cache in caches.items() if name.startswith(kind)) for kind in ("state", "full")
    ]
    return by_kind[0], by_kind[1]


# Chunks have 64 tokens. A checkpoint takes two blocks of states, or one of states and four of a window. Attention takes one
# block per 32 tokens.
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("shape", "shared", "resumed_at"),
    [
        ("checkpointed", 290, 256),
        ("checkpointed", 250, 192),
        ("checkpointed and windowed", 290, 192),
        ("windowed", 280, 256),
        ("short windows", 280, 256),
        ("chunked", 280, 256),
        ("recurrent", 290, 0),
    ],
)
def test_a_branch_of_an_earlier_prompt_begins_at_the_last_checkpoint(
    engines: ScheduledEngines, shape: str, shared: int, resumed_at: int, asynchronous: bool
) -> None:
    caches_prefixes = "checkpointed" in shape
    engine = engines.decoder(shape, caches_prefixes=caches_prefixes, asynchronous=asynchronous, **REUSES_SHORT_ONES)
    engine.submit("first", prompt_of(29, LENGTH), {}, answer_tokens=1)
    engines.run_until_finished(["first"])
    engines.assert_nothing_is_left()
    assert engine.scheduler.reset_prefix_cache(), "every block that was pinned is free again"
    engine.submit("branch", [*prompt_of(29, shared), *prompt_of(30, 60)], {}, answer_tokens=2)
    engines.run_until_finished(["branch"])
    assert engine.told.resumed_at == {"first": 0, "branch": resumed_at}
    assert engine.told.wrong_blocks == []
    engines.assert_nothing_is_left()


def test_only_the_missing_state_is_loaded_beside_local_attention(engines: ScheduledEngines) -> None:
    """The engine holds nine of ten blocks of attention; the tenth was never full."""
    engine = engines.decoder("checkpointed", caches_prefixes=True, **REUSES_SHORT_ONES)
    prompt = prompt_of(31, LENGTH)
    engine.submit("first", prompt, {}, answer_tokens=1)
    engines.run_until_finished(["first"])
    engines.assert_nothing_is_left()
    engine.evict_states()
    engine.submit("second", [*prompt, *prompt_of(32, 60)], {}, answer_tokens=2)
    engines.run_until_finished(["second"])
    assert engine.told.resumed_at["second"] == LENGTH
    states, block = _bytes_of("checkpointed")
    assert engine.told.copied_bytes["receive"] == states + block
    assert engine.told.wrong_blocks == []
    engines.assert_nothing_is_left()


def test_local_attention_beyond_a_checkpoint_does_not_hide_the_checkpoint(engines: ScheduledEngines) -> None:
    """Nothing reaches beyond the 288 tokens of local attention, which are useless without a state."""
    engine = engines.decoder("checkpointed", caches_prefixes=True, **REUSES_SHORT_ONES)
    engine.submit("first", prompt_of(33, LENGTH), {}, answer_tokens=1)
    engines.run_until_finished(["first"])
    engines.assert_nothing_is_left()
    engine.evict_states()
    engine.submit("branch", [*prompt_of(33, 290), *prompt_of(34, 60)], {}, answer_tokens=2)
    engines.run_until_finished(["branch"])
    assert engine.told.resumed_at["branch"] == 256
    assert engine.told.wrong_blocks == []
    engines.assert_nothing_is_left()


def test_a_transfer_no_longer_than_local_attention_still_loads_its_state(
    engines: ScheduledEngines,
) -> None:
    prefiller = engines.prefiller("checkpointed", caches_prefixes=True)
    decoder = engines.decoder("checkpointed", caches_prefixes=True)
    prompt = prompt_of(35, 289)
    decoder.submit("first", prompt, {}, answer_tokens=1)
    engines.run_until_finished(["first"])
    decoder.evict_states()
    grant = engines.grant(prompt)
    decoding = decoder.receive(prompt, grant)
    prefiller.send(prompt, grant)
    engines.run_until_finished([decoding])
    assert decoder.told.resumed_at[decoding] == 288
    assert decoder.told.wrong_blocks == []
    assert decoder.told.outcomes == {"receive completed": 1}
    engines.assert_nothing_is_left()
