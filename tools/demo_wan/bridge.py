"""Passes TCP connections through a Unix socket, which knows no network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

_PIECE_BYTES = 1 << 16


async def pass_to_unix(socket: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, to whoever listens on the socket."""
    with contextlib.closing(writer), contextlib.suppress(OSError):
        far_reader, far_writer = await asyncio.open_unix_connection(socket)
        with contextlib.closing(far_writer):
            await _both(reader, writer, far_reader=far_reader, far_writer=far_writer)


async def pass_to_tcp(host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, to a TCP address."""
    with contextlib.closing(writer), contextlib.suppress(OSError):
        far_reader, far_writer = await asyncio.open_connection(host, port)
        with contextlib.closing(far_writer):
            await _both(reader, writer, far_reader=far_reader, far_writer=far_writer)


async def _both(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Until either side ends."""
    pumps = [asyncio.create_task(_pump(reader, far_writer)), asyncio.create_task(_pump(far_reader, writer))]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
