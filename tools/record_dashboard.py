"""`python -m tools.record_dashboard`: records the pictures of the docs from the live page of `make demo-wan`; needs root.

Writes `dashboard-light.png`, `dashboard-dark.png`, and the animated `dashboard.webp` to docs/images. Each second of a
minute is one frame, in which the link becomes slower and recovers. Needs Pillow, which the extra `plot` brings.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.async_api import Page, async_playwright

from tools.free_ports import free_address

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = {"width": 1440, "height": 1000}
FRAME_SIZE = (1080, 750)
LINK = ("RTT=80ms", "RATE=200Mbps")
WARM_UP_SECONDS = 100
NUM_FRAMES, FRAME_MILLISECONDS = 60, 200
COMMANDS = {12: "rate 30Mbps\n", 32: "rate 200Mbps\n"}  # By the number of the frame.
START_SECONDS = 120


class Recorder:
    """Latest frame of Chromium's screencast of a page."""

    def __init__(self) -> None:
        self.frame = b""

    async def start(self, page: Page) -> None:
        session = await page.context.new_cdp_session(page)

        async def take(event: dict[str, Any]) -> None:
            self.frame = base64.b64decode(event["data"])
            await session.send("Page.screencastFrameAck", {"sessionId": event["sessionId"]})

        session.on("Page.screencastFrame", lambda event: asyncio.ensure_future(take(event)))
        await session.send("Page.startScreencast", {"format": "png"})
        self._session = session

    async def stop(self) -> None:
        await self._session.send("Page.stopScreencast")


async def record(url: str, demo: subprocess.Popen[str]) -> None:
    """Write the pictures of a live page. `demo` takes commands that change the link."""
    async with async_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = await browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        await page.goto(f"{url}/dashboard/#range=300")
        await page.locator("#latest-request:has-text('remote')").wait_for(timeout=START_SECONDS * 1000)
        await asyncio.sleep(WARM_UP_SECONDS)
        for words in (".tile:has-text('mean TTFT')", "#map-drawing :text('carries')"):
            await page.locator(words).first.wait_for(timeout=START_SECONDS * 1000)
        for colors in ("dark", "light"):
            await page.locator("#theme").select_option(colors)
            await page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
            await page.screenshot(path=IMAGES / f"dashboard-{colors}.png")
        recorder, frames = Recorder(), list[Image.Image]()
        await recorder.start(page)
        for number in range(NUM_FRAMES):
            await asyncio.sleep(1.0)
            if recorder.frame:
                frames.append(Image.open(io.BytesIO(recorder.frame)).convert("RGB").resize(FRAME_SIZE))
            if number in COMMANDS and demo.stdin is not None:
                demo.stdin.write(COMMANDS[number])
                demo.stdin.flush()
        await recorder.stop()
        await browser.close()
    moving = IMAGES / "dashboard.webp"
    first, *rest = frames
    first.save(
        moving, save_all=True, append_images=rest, duration=FRAME_MILLISECONDS, loop=0, quality=50, method=4, kmax=60
    )
    sys.stdout.write(f"{moving}: {len(frames)} frames, {moving.stat().st_size:,} bytes\n")


def is_live(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/healthz", timeout=1).close()
    except OSError:
        return False
    return True


def main() -> None:
    """Start the demo, record it, and end it."""
    address = free_address()
    command = [sys.executable, "-m", "tools.demo_wan"]
    environment = {**os.environ, "PAGE": address, **dict(part.split("=") for part in LINK)}
    demo = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_live(f"http://{address}") and time.monotonic() < deadline:
            time.sleep(1.0)
        asyncio.run(record(f"http://{address}", demo))
    finally:
        os.killpg(demo.pid, signal.SIGTERM)
        demo.wait()


if __name__ == "__main__":
    main()
