"""Command `python -m tools.paced_engine`: serve until a signal arrives."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from aiohttp import web

from prfaas.errors import AgentUnreachable
from prfaas.kv.layout import Layout
from prfaas.units import split_address
from tools.paced_engine.kv import layout_of
from tools.paced_engine.pool import PoolClient
from tools.paced_engine.server import Pace, Server

RETRY_SECONDS = 0.5


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket of the agent")
    parser.add_argument("--listen", required=True, help="host:port of the OpenAI server")
    parser.add_argument("--instance", required=True)
    parser.add_argument("--model", default="paced")
    parser.add_argument("--bytes-per-token", type=int, default=2048)
    parser.add_argument("--state-bytes", type=int, default=65_536)
    parser.add_argument("--prefill-seconds", type=float, default=0.02)
    parser.add_argument("--prefill-seconds-per-token", type=float, default=1e-4)
    parser.add_argument("--token-seconds", type=float, default=0.005)
    parser.add_argument("--decode-slots", type=int, default=1 << 20, help="number of concurrent answers")
    parser.add_argument("--journal", type=Path, help="file to which the end of each transfer is appended")
    return parser.parse_args()


async def _attach(socket: str, instance: str, layout: Layout) -> PoolClient:
    """Attach to the agent; retry while it is starting."""
    while True:
        try:
            return PoolClient(socket, instance, layout)
        except AgentUnreachable:
            await asyncio.sleep(RETRY_SECONDS)


async def _serve(arguments: argparse.Namespace) -> None:
    layout = layout_of(arguments.model, bytes_per_token=arguments.bytes_per_token, state_bytes=arguments.state_bytes)
    pool = await _attach(arguments.socket, arguments.instance, layout)
    pace = Pace(
        arguments.prefill_seconds,
        arguments.prefill_seconds_per_token,
        arguments.token_seconds,
        arguments.decode_slots,
    )
    app = Server(arguments.model, pool, pace, journal=arguments.journal).app()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, *split_address(arguments.listen)).start()
    try:
        await pool.run()
    finally:
        await runner.cleanup()
        pool.close()


if __name__ == "__main__":
    asyncio.run(_serve(_arguments()))
