"""What an engine's metrics page says of its load."""

from __future__ import annotations

import pytest

from prfaas.agent.engine_load import load_from_page
from prfaas.index.membership import EngineLoad
from prfaas.types import InstanceId

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 100.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
"""


def test_the_ranks_of_an_engine_are_added_up() -> None:
    assert load_from_page(InstanceId("a"), PAGE) == EngineLoad(InstanceId("a"), 5, 7, 0.5)


def test_a_page_of_something_else_is_no_load() -> None:
    with pytest.raises(ValueError, match="num_requests_running"):
        load_from_page(InstanceId("a"), b"process_cpu_seconds_total 3\n")
