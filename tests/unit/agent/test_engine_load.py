"""What an engine's metrics page says of its load."""

from __future__ import annotations

import asyncio

import pytest

from prfaas.agent.config import EngineConfig
from prfaas.agent.report import EngineLoads, load_from_page
from prfaas.index.membership import EngineLoad
from prfaas.types import InstanceId
from tests.support.waiting import until

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 100.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
"""


def test_load_of_data_parallel_ranks_is_summed() -> None:
    assert load_from_page(InstanceId("a"), PAGE) == EngineLoad(InstanceId("a"), 5, 7, 0.5)


def test_page_without_vllm_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="num_requests_running"):
        load_from_page(InstanceId("a"), b"process_cpu_seconds_total 3\n")


async def test_engine_without_http_answer_is_asked_again() -> None:
    asked = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"what?\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    engine = EngineConfig(instance="a", url=f"http://127.0.0.1:{port}", role="both", model="m")
    loads = EngineLoads([engine])
    watching = asyncio.create_task(loads.watch_forever())
    await until(lambda: len(asked) == 2)
    assert loads.current() == () and not watching.done()
    watching.cancel()
    server.close()


@pytest.mark.parametrize("figure", [b"-1.0", b"1e12", b"1e999"])
@pytest.mark.parametrize("sample", [b" 3.0", b" 7.0", b" 0.25"])
def test_impossible_load_figures_are_refused(sample: bytes, figure: bytes) -> None:
    with pytest.raises(ValueError, match="on its page"):
        load_from_page(InstanceId("a"), PAGE.replace(sample, b" " + figure).replace(b" 2.0", b" 0.0"))
