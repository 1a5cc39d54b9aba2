"""Reports to the managers: links, engine loads and GPU names."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.agent import report
from prfaas.agent.config import AgentConfig, EngineConfig
from prfaas.agent.engine.protocol import Promised
from prfaas.agent.report import EngineLoads, NodeReporter, load_from_page
from prfaas.errors import RemoteProtocolError
from prfaas.index.membership import EngineLoad, LinkFigures
from prfaas.rpc.tasks import cancel_tasks
from prfaas.transport.sender.stats import LinkStats
from prfaas.types import AgentName, InstanceId
from tests.support.waiting import until
from tests.unit.agent.test_status import CONGESTED


def _no_command(command: object) -> None:
    raise AssertionError(f"unexpected command {command}")


def _reporter(links: Callable[[], list[LinkStats]]) -> NodeReporter:
    return NodeReporter(
        AgentConfig(name="west-0", secret_file=Path("secret"), cluster="west", managers=("127.0.0.1:1",)),
        b"s" * 32,
        epoch=1,
        wire_address="127.0.0.1:7400",
        link_stats=links,
        on_command=_no_command,
    )


async def test_figures_contain_congestion_and_limit_of_a_link() -> None:
    state = replace(CONGESTED, queued_bytes=4, unacknowledged_bytes=3, is_down=False)
    assert _reporter(lambda: [state]).figures().links == (
        LinkFigures(
            AgentName("tokyo-1"),
            bytes_per_second=0.0,
            capacity_bytes_per_second=1e8,
            rtt_seconds=0.09,
            min_rtt_seconds=0.03,
            queued_bytes=7,
            retransmit_ratio=0.0,
            num_connections=8,
            congestion="queue",
        ),
    )


async def test_few_segments_are_not_reported_as_loss() -> None:
    sent = (0, 48_000, 48_000 + 480_000)
    states = [
        replace(CONGESTED, sent_bytes=num_bytes, retransmitted_bytes=num_bytes // 20, segment_bytes=1448)
        for num_bytes in sent
    ]
    reporter = _reporter(lambda: [states.pop(0)])
    assert [reporter.figures().links[0].retransmit_ratio for _ in range(3)] == [0.0, 0.0, 0.05]


@pytest.mark.parametrize(("predicted", "found"), [(-30, 5), (30, -5), (1 << 32, 5), (30, 1 << 32)])
async def test_promise_out_of_range_breaks_the_protocol(predicted: int, found: int) -> None:
    with pytest.raises(RemoteProtocolError):
        _reporter(list).on_promise(Promised(predicted, found))
    _reporter(list).on_promise(Promised((1 << 32) - 1, 0))


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


async def test_engine_without_http_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LOAD_INTERVAL_SECONDS", 0.05)
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


KNOWN = EngineLoad(InstanceId("a"), 5, 7, 0.5)


@contextlib.asynccontextmanager
async def _watched_engine(answers: asyncio.Event, *, path: bytes = b"/") -> AsyncIterator[EngineLoads]:
    """Yield the loads of an engine that answers while the event is set, and always for other paths."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if path in await reader.readuntil(b"\r\n\r\n"):
            await answers.wait()
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + PAGE)
        writer.close()

    answers.set()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    loads = EngineLoads([EngineConfig(instance="a", url=f"http://127.0.0.1:{port}", role="both", model="m")])
    watching = asyncio.create_task(loads.watch_forever())
    try:
        await until(lambda: loads.current() == (KNOWN,), what="the load")
        yield loads
    finally:
        answers.set()
        await cancel_tasks((watching,))
        await until(lambda: not any(thread.name.startswith("engine-load") for thread in threading.enumerate()))
        server.close()


@pytest.mark.parametrize("path", [b"/", b"/health", b"/metrics"])
async def test_engine_that_stops_answering_is_silent_until_it_answers(
    path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "LOAD_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(report, "SILENCE_SECONDS", 0.5)
    answers = asyncio.Event()
    async with _watched_engine(answers, path=path) as loads:
        answers.clear()
        await until(lambda: loads.current() == (replace(KNOWN, is_silent=True),), what="silence")
        answers.set()
        await until(lambda: loads.current() == (KNOWN,), what="an answer")


async def test_a_pause_of_the_agent_itself_is_no_silence_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LOAD_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(report, "SILENCE_SECONDS", 1.0)
    answers = asyncio.Event()
    async with _watched_engine(answers) as loads:
        answers.clear()
        await asyncio.sleep(0.2)  # A question is under way.
        time.sleep(1.2)  # noqa: ASYNC251 - the pause is what is tested
        await asyncio.sleep(0.05)
        assert loads.current() == (KNOWN,)
        answers.set()


@pytest.mark.parametrize("figure", [b"-1.0", b"1e12", b"1e999"])
@pytest.mark.parametrize("sample", [b" 3.0", b" 7.0", b" 0.25"])
def test_impossible_load_figures_are_refused(sample: bytes, figure: bytes) -> None:
    with pytest.raises(ValueError, match="on its page"):
        load_from_page(InstanceId("a"), PAGE.replace(sample, b" " + figure).replace(b" 2.0", b" 0.0"))
