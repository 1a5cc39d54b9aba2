"""Both phases of a colocated instance need little more memory than one engine: weights and KV exist once."""

from collections.abc import Callable

import pytest

from tests.integration.colocate.conftest import MakeInstance
from tests.integration.colocate.instance import Instance, mixed_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.soak]
SEVERAL_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # vLLM's default.


def _used_bytes(instance: Instance) -> int:
    instance.ask_all(mixed_prompts(40, seed=7))
    return instance.resident_bytes()


@pytest.mark.timeout(1800)
def test_a_colocated_instance_is_at_most_fifteen_percent_larger_than_an_engine(
    make_instance: MakeInstance, record_property: Callable[[str, object], None]
) -> None:
    plain = _used_bytes(make_instance("smollm2", is_plain=True, environment=SEVERAL_PROCESSES))
    colocated = _used_bytes(make_instance("smollm2", environment=SEVERAL_PROCESSES))
    record_property("MiB of both phases, of one engine", (colocated >> 20, plain >> 20))
    assert colocated <= 1.15 * plain
