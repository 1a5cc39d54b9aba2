"""Command `make demo-wan`: run a deployment over an emulated link. Input lines such as "rtt 200ms" change the link."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import FrameType

from prfaas.units import parse_rate, parse_seconds, split_address
from tools.demo_wan.bridge import forward_to_unix
from tools.wan import Wan, WanShape, obstacle

SIGNALS = (signal.SIGINT, signal.SIGTERM)
KNOBS = "rtt 200ms | loss 0.001 | rate 300Mbps | quit"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo-wan", description=__doc__)
    parser.add_argument("--rtt", default=os.environ.get("RTT") or "80ms")
    parser.add_argument("--loss", default=os.environ.get("LOSS") or "0")
    parser.add_argument("--rate", default=os.environ.get("RATE") or "200Mbps")
    parser.add_argument("--page", default=os.environ.get("PAGE") or "127.0.0.1:7411", help="address of the dashboard")
    arguments = parser.parse_args()
    if reason := obstacle():
        sys.stderr.write(f"demo-wan {reason}\n")
        return 2
    shape = WanShape(1e9, 0.08)
    try:
        for knob in ("rtt", "loss", "rate"):
            shape = apply_knob(shape, f"{knob} {getattr(arguments, knob)}")
    except ValueError as error:
        sys.stderr.write(f"demo-wan: {error}\n")
        return 2
    for number in SIGNALS:
        signal.signal(number, _stop)  # Removes the link even if a signal arrives while it is created.
    try:
        return _run(shape, arguments.page)
    except KeyboardInterrupt:
        return 0


def _stop(number: int, frame: FrameType | None) -> None:
    # `make` forwards signals of its group: a second signal must not interrupt the shutdown.
    for handled in SIGNALS:
        signal.signal(handled, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(shape: WanShape, page: str) -> int:
    with tempfile.TemporaryDirectory(prefix="prfaas-demo-wan-") as directory, Wan(shape) as wan:
        socket = Path(directory) / "page.sock"
        inner = wan.near(
            [sys.executable, "-m", "tools.demo_wan.deployment", directory, str(socket), *wan.inside("far")],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return asyncio.run(_show(wan, inner, socket, page))
        finally:
            inner.send_signal(signal.SIGTERM)
            inner.wait()


def apply_knob(shape: WanShape, line: str) -> WanShape:
    """Return the shape after one knob has been changed.

    Raises:
        ValueError: The knob or its value is unknown.
    """
    knob, _, value = line.strip().partition(" ")
    try:
        if knob == "rtt":
            return replace(shape, rtt_seconds=parse_seconds(value))
        if knob == "rate" and parse_rate(value):
            return replace(shape, bits_per_second=parse_rate(value) * 8)
        if knob == "loss" and 0 <= float(value) < 1:
            return replace(shape, loss=float(value))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{line.strip()!r}: {error}; write one of: {KNOBS}") from error
    raise ValueError(f"{line.strip()!r}: write one of: {KNOBS}")


async def _show(wan: Wan, inner: subprocess.Popen[str], socket: Path, page: str) -> int:
    """Forward the dashboard and apply knobs until a signal arrives or the deployment ends."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        # A handler of the loop would disappear before the link is removed.
        signal.signal(number, lambda *_: stopped.set())
    with contextlib.suppress(OSError):  # The loop cannot wait for files: the knobs then keep their values.
        loop.add_reader(sys.stdin, _read_knob, wan, stopped)
    server = await asyncio.start_server(
        lambda reader, writer: forward_to_unix(socket, reader, writer), *split_address(page)
    )
    async with server:
        print(f"dashboard: http://{page}/ (starting)\nknobs: {KNOBS}", flush=True)
        is_live = False
        while inner.poll() is None and not stopped.is_set():
            if not is_live and socket.exists():  # noqa: ASYNC240 - a local file, created once all processes run
                is_live = True
                print("dashboard: live", flush=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), 0.2)
    loop.remove_reader(sys.stdin)
    return 0 if stopped.is_set() else 1


def _read_knob(wan: Wan, stopped: asyncio.Event) -> None:
    line = sys.stdin.readline()
    if not line:
        asyncio.get_running_loop().remove_reader(sys.stdin)
    elif line.strip() == "quit":
        stopped.set()
    elif line.strip():
        try:
            wan.set(apply_knob(wan.shape, line))
            rate, rtt = wan.shape.bits_per_second / 1e6, wan.shape.rtt_seconds * 1e3
            print(f"link: {rate:g} Mbit/s, {rtt:g} ms, loss {wan.shape.loss:g}", flush=True)
        except ValueError as error:
            print(error, flush=True)
