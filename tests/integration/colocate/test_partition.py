"""The cores of a running colocated instance follow its traffic."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.colocate.conftest import MakeInstance
from tests.integration.colocate.instance import Instance, Prompt, mixed_prompts
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.soak]
ADAPTS_WITHIN_SECONDS = 2.0


@pytest.fixture(scope="module")
def instance(make_instance: MakeInstance) -> Instance:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core cannot be divided")
    return make_instance("gemma3")


def _cores(instance: Instance, phase: str) -> set[int]:
    return os.sched_getaffinity(instance.worker(phase))


def _await_division(instance: Instance, *, is_divided: bool) -> float:
    """Return the seconds until decode shares no core with prefill, or has all."""
    everything = os.sched_getaffinity(0)
    started = time.monotonic()

    def is_so() -> bool:
        decode = _cores(instance, "decode")
        divided = decode < everything and not decode & _cores(instance, "prefill")
        return divided if is_divided else decode == everything

    wait_until(is_so, seconds=30, what=f"cores that are {'' if is_divided else 'not '}divided")
    return time.monotonic() - started


@pytest.mark.timeout(900)
def test_a_long_prompt_takes_cores_from_decode_within_two_seconds_and_gives_them_back(instance: Instance) -> None:
    short, long = Prompt(mixed_prompts(1, seed=8)[0].token_ids[:20], 3500), mixed_prompts(1, seed=9)[0].token_ids
    prompt = Prompt((long * 4000)[:4000], 1)
    with ThreadPoolExecutor(2) as threads:
        decoding = threads.submit(instance.ask, short)
        wait_until(lambda: instance.metric("vllm:num_requests_running") > 0, what="a running request")
        assert _await_division(instance, is_divided=False) < ADAPTS_WITHIN_SECONDS
        prefilling = threads.submit(instance.ask, prompt)
        assert _await_division(instance, is_divided=True) < ADAPTS_WITHIN_SECONDS
        prefilling.result()
        assert not decoding.done(), "decode ended too early to show anything"
        assert _await_division(instance, is_divided=False) < ADAPTS_WITHIN_SECONDS
        decoding.result()
