"""`python -m benchmarks.dashboard.screenshots URL`: writes the pictures of docs/dashboard.md from a live page."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.integration.dashboard.browser import chromium

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SIZE = {"width": 1440, "height": 1330}
NUM_TILES = 10


async def take(url: str) -> None:
    """Take the page in both color schemes, once its figures and charts are there."""
    async with chromium() as open_window:
        page = (await open_window()).page
        await page.set_viewport_size(SIZE)  # type: ignore[arg-type]
        await page.goto(f"{url.rstrip('/')}/dashboard/#range=300")
        await page.locator(f".tile:nth-child({NUM_TILES})").wait_for()
        await page.locator(".tile:has-text('mean TTFT')").wait_for()
        for colors in ("light", "dark"):
            await page.locator("#theme").select_option(colors)
            await page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
            await page.screenshot(path=IMAGES / f"dashboard-{colors}.png")


if __name__ == "__main__":
    asyncio.run(take(sys.argv[1]))
