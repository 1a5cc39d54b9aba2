"""Forwarding of TCP connections through a Unix socket, which works across network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

_PIECE_BYTES = 1 << 16


async def forward_to_unix(socket: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward a connection to a Unix socket, until an end closes it or the command ends."""
    with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
        far_reader, far_writer = await asyncio.open_unix_connection(socket)
        with contextlib.closing(far_writer):
            await _copy_both(reader, writer, far_reader=far_reader, far_writer=far_writer)


async def forward_to_tcp(host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward a connection to a TCP address, until an end closes it or the command ends."""
    with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
        far_reader, far_writer = await asyncio.open_connection(host, port)
        with contextlib.closing(far_writer):
            await _copy_both(reader, writer, far_reader=far_reader, far_writer=far_writer)


async def _copy_both(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Copy both directions until either side ends."""
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
