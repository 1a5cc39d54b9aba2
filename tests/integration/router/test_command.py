"""Process `prfaas-router` without torch, vLLM and numpy: start, service and orderly end."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.support.paced_engine import MODEL, PacedEngine, running
from tests.support.router import SHORT, STREAMED
from tests.support.waiting import PATIENCE_SECONDS
from tools.free_ports import free_address

ABSENT = "import sys; sys.modules.update(torch=None, vllm=None, numpy=None)"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
WITHOUT_ALL = f"{ABSENT}; from prfaas.cli.router import main; sys.exit(main())"


@contextlib.asynccontextmanager
async def _router(directory: Path, engine: PacedEngine) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    address = free_address()
    (directory / "secret").write_bytes(bytes(32))
    (directory / "secret").chmod(0o600)
    instance = {"name": "w", "url": engine.url, "role": "both", "agent": "w", "wire": "127.0.0.1:1"}
    config = {
        "listen": address,
        "secret_file": str(directory / "secret"),
        "probe_interval": "100ms",
        "clusters": [{"name": "west", "kind": "pd", "instances": [instance]}],
    }
    (directory / "router.yaml").write_text(yaml.safe_dump(config))
    arguments = ("-c", WITHOUT_ALL, "--config", str(directory / "router.yaml"))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=asyncio.subprocess.PIPE)
    try:
        yield process, f"http://{address}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _serves(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "token_seconds"),
    [(signal.SIGTERM, 0.3), *(pytest.param(number, 8.0, marks=pytest.mark.soak) for number in SIGNALS)],
)
async def test_signal_lets_running_answers_end_before_the_process(
    tmp_path: Path, number: signal.Signals, token_seconds: float
) -> None:
    engine = PacedEngine(token_seconds=token_seconds)
    async with running(engine), _router(tmp_path, engine) as (process, url), aiohttp.ClientSession() as session:
        await _serves(session, url)
        body = {"model": MODEL, "prompt": SHORT, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            first = await response.content.readany()
            process.send_signal(number)
            assert first + await response.read() == STREAMED
        _, errors = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
        assert process.returncode == 0
        assert b"router.started" in errors and b"Traceback" not in errors


async def test_second_signal_ends_the_process_beside_a_running_answer(tmp_path: Path) -> None:
    engine = PacedEngine(token_seconds=PATIENCE_SECONDS * 2)
    async with running(engine), _router(tmp_path, engine) as (process, url), aiohttp.ClientSession() as session:
        await _serves(session, url)
        body = {"model": MODEL, "prompt": SHORT, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            await response.content.readany()
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            while b"router.stopping" not in await asyncio.wait_for(process.stderr.readline(), PATIENCE_SECONDS):
                pass
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(process.wait(), 0.5)
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)
        assert process.returncode == 0


async def test_taken_address_is_named_and_stops_the_start(tmp_path: Path) -> None:
    engine = PacedEngine()
    async with running(engine), _router(tmp_path, engine) as (_, url), aiohttp.ClientSession() as session:
        await _serves(session, url)
        arguments = ("-c", WITHOUT_ALL, "--config", str(tmp_path / "router.yaml"))
        second = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=asyncio.subprocess.PIPE)
        _, errors = await asyncio.wait_for(second.communicate(), PATIENCE_SECONDS)
        assert second.returncode == 2 and f"listen: {url.removeprefix('http://')} cannot be bound" in errors.decode()
