"""Workers of a colocated instance die or freeze at any moment, and its answers stay those of plain vLLM."""

import os
import signal
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from prfaas.colocate.serve import ENDS_WITHIN_SECONDS, MAX_ENDS
from tests.integration.colocate.conftest import MakeInstance
from tests.integration.colocate.instance import Instance, Prompt, mixed_prompts
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


_ended_at = deque([-ENDS_WITHIN_SECONDS] * MAX_ENDS, MAX_ENDS)  # Last deaths of decode workers.
FLAGS = ("--no-enable-prefix-caching",)  # The prefill worker computes a repeated prompt again.


@pytest.fixture(scope="module")
def instance(make_instance: MakeInstance) -> Instance:
    return make_instance("gemma3", flags=FLAGS)


def _await_worker(instance: Instance, phase: str) -> None:
    wait_until(lambda: instance.worker(phase) > 0, seconds=60, what=f"a {phase} worker")


def _await_restart(instance: Instance, killed: int) -> None:
    """Wait for the engine that follows a dead decode worker."""
    _ended_at.append(time.monotonic())
    wait_until(lambda: instance.worker("decode") not in (0, killed), seconds=600, what="another decode worker")
    instance.wait()


def _assert_no_block_is_lost(instance: Instance) -> None:
    wait_until(lambda: instance.metric("vllm:kv_cache_usage_perc") == 0, seconds=60, what="an empty KV cache")


@pytest.mark.timeout(900)
def test_mixed_prompts_give_the_tokens_of_plain_vllm(instance: Instance, make_instance: MakeInstance) -> None:
    """`make soak` repeats this with more prompts, models and prefix caching (`test_equal_tokens.py`)."""
    prompts = mixed_prompts(40, seed=40)
    answers = instance.ask_all(prompts)
    assert instance.metric("vllm:external_prefix_cache_hits_total") > 0, "no prompt went to the prefill worker"
    plain = make_instance("gemma3", is_plain=True, flags=FLAGS)
    assert answers == plain.ask_all(prompts)
    plain.stop()


@pytest.mark.timeout(900)
def test_the_death_of_the_prefill_worker_changes_no_answer(instance: Instance) -> None:
    prompts = mixed_prompts(24, seed=3)
    expected = instance.ask_all(prompts)
    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(instance.ask, prompt) for prompt in prompts]
        for _ in range(3):
            _await_worker(instance, "prefill")
            instance.kill("prefill")
        assert [answer.result() for answer in answers] == expected
    _assert_no_block_is_lost(instance)


@pytest.mark.timeout(900)
def test_a_prefill_worker_that_freezes_changes_no_answer(instance: Instance) -> None:
    prompts = mixed_prompts(12, seed=8)
    expected = instance.ask_all(prompts)
    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(instance.ask, prompt) for prompt in prompts]
        _await_worker(instance, "prefill")
        frozen = instance.kill("prefill", signal.SIGSTOP)
        assert [answer.result() for answer in answers] == expected
    wait_until(lambda: instance.worker("prefill") not in (0, frozen), seconds=60, what="another prefill worker")
    _assert_no_block_is_lost(instance)


@pytest.mark.soak  # A slow machine may not wake it in time.
@pytest.mark.timeout(900)
def test_a_prefill_worker_that_wakes_in_time_goes_on(instance: Instance) -> None:
    prompts = mixed_prompts(6, seed=9)
    expected = instance.ask_all(prompts)
    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(instance.ask, prompt) for prompt in prompts]
        _await_worker(instance, "prefill")
        frozen = instance.kill("prefill", signal.SIGSTOP)
        os.kill(frozen, signal.SIGCONT)
        assert [answer.result() for answer in answers] == expected
    assert instance.worker("prefill") == frozen


@pytest.mark.timeout(900)
def test_decode_computes_a_prompt_on_which_prefill_workers_always_die(instance: Instance) -> None:
    token_ids = mixed_prompts(1, seed=6)[0].token_ids * 100
    prompt = Prompt(token_ids[:4000], 8)
    expected = instance.ask(prompt)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(instance.ask, prompt)
        while not answer.done():
            instance.kill("prefill")
        assert answer.result() == expected
    instance.ask(prompt)
    _assert_no_block_is_lost(instance)


@pytest.mark.soak  # The engine takes more than a minute to start again.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_decode_worker_that_dies_or_freezes_ends_requests_and_the_instance_comes_back(
    instance: Instance, sent: signal.Signals
) -> None:
    prompts = mixed_prompts(6, seed=4)
    expected = instance.ask_all(prompts)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(instance.ask, Prompt(prompts[0].token_ids, 2000))
        wait_until(lambda: instance.metric("vllm:num_requests_running") > 0, what="a running request")
        killed = instance.kill("decode", sent)
        assert answer.exception(timeout=60) is not None
    _await_restart(instance, killed)
    assert instance.ask_all(prompts) == expected
    _assert_no_block_is_lost(instance)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_deaths_leave_no_wrong_token_and_no_lost_block(instance: Instance, seed: int) -> None:
    random = Random(seed)
    prompts = mixed_prompts(12, seed=5)
    expected = instance.ask_all(prompts)
    for _ in range(10):
        may_end = time.monotonic() - _ended_at[0] > ENDS_WITHIN_SECONDS  # Else the instance gives up.
        phase = "decode" if random.random() < 0.2 and may_end else "prefill"
        with ThreadPoolExecutor(6) as threads:
            answers = [threads.submit(instance.ask, prompt) for prompt in prompts]
            answers[random.randrange(len(answers))].exception()
            _await_worker(instance, phase)
            killed = instance.kill(phase)
            for answer, tokens in zip(answers, expected, strict=True):
                lost = answer.exception()
                assert phase == "decode" if lost else answer.result() == tokens
        if phase == "decode":
            _await_restart(instance, killed)
        _assert_no_block_is_lost(instance)
