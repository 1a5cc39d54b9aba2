"""Chromium with one page, and its findings: console errors, requests, accessibility violations of axe-core."""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs playwright (pip install playwright axe-playwright-python)")
pytest.importorskip("axe_playwright_python", reason="needs axe-core (pip install axe-playwright-python)")

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import ConsoleMessage, Page, Playwright, async_playwright

from tests.support.waiting import PATIENCE_SECONDS, POLL_SECONDS

NAMES = ("chromium", "chromium-browser", "google-chrome")
UNANSWERED = "net::ERR_"  # Chromium's own words about a connection that nobody took


def _path(playwright: Playwright) -> str:
    """Return the path of Chromium, or skip the test if there is none."""
    found = [path for name in NAMES if (path := shutil.which(name))]
    own = playwright.chromium.executable_path
    if not found and not Path(own).exists():
        pytest.skip("needs Chromium: apt install chromium, or .venv/bin/playwright install chromium")
    return found[0] if found else own


class Window:
    """One page of the browser."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def forget_unanswered(self) -> None:
        """Leave out what Chromium itself says of connections while nobody listens."""
        self.errors = [error for error in self.errors if UNANSWERED not in error]

    async def text(self, selector: str) -> str:
        """Return the visible text of an element; empty if there is none."""
        found = self.page.locator(selector)
        return (await found.first.text_content() or "") if await found.count() else ""

    async def figures(self, panel: str) -> dict[str, float]:
        """The metrics that a panel shows, and the figures that it shows of them."""
        script = "its => its.map(one => [one.dataset.metric, Number(one.dataset.value)])"
        shown = await self.page.locator(f"#{panel} [data-metric]").evaluate_all(script)
        return {name: value for name, value in shown}  # noqa: C416 - two-element lists of JavaScript

    async def faults(self) -> list[str]:
        """Return the serious and critical violations of axe-core."""
        report: dict[str, Any] = (await Axe().run(self.page)).response
        grave = [violation for violation in report["violations"] if violation["impact"] in ("serious", "critical")]
        return [
            f"{violation['id']}: {violation['help']}: {[node['target'] for node in violation['nodes']]}"
            for violation in grave
        ]

    async def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        script = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        width: int = await self.page.evaluate(script)
        return width


@asynccontextmanager
async def chromium() -> AsyncIterator[Callable[[], Awaitable[Window]]]:
    """Opens windows of one headless Chromium."""
    async with async_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await playwright.chromium.launch(executable_path=_path(playwright), args=arguments)

        async def window() -> Window:
            page = await browser.new_page()
            page.set_default_timeout(PATIENCE_SECONDS * 1000)
            return Window(page)

        yield window
        await browser.close()


async def until_true(ask: Callable[[], Awaitable[object]], *, seconds: float = PATIENCE_SECONDS) -> None:
    """Ask until the answer is true; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not await ask():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(5 * POLL_SECONDS)
