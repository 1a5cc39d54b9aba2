"""Dashboard in Chromium with a real manager: live figures that agree with the metrics, and accessibility."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import Page
from prometheus_client.parser import text_string_to_metric_families

from prfaas.index.membership import EngineLoad, Figures, LinkFigures
from prfaas.manager.daemon import Manager
from prfaas.router.routing.reports import RequestReports
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.reporter import Reporter
from prfaas.types import AgentName, InstanceId
from tests.integration.dashboard.browser import Window, chromium, until_true
from tests.integration.manager.test_routing import route_request
from tests.support.deployment import Deployment, chain_of, hybrid_layout, stored
from tests.support.waiting import PATIENCE_SECONDS, until
from tools.free_ports import free_address

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

LAYOUT = hybrid_layout()
WITH_FIGURES = ("summary", "map", "threshold", "routes", "paths", "pool", "sessions")
TILE_OF_T = ".tile:has-text('Threshold t')"
BUSY = LinkFigures(AgentName("d1"), 40e6, 125e6, 0.08, 0.08, 1 << 20, 0.001, num_connections=8)


class Stage:
    """A manager on a fixed address, two nodes whose figures the test sets, and the window that looks at them."""

    def __init__(self, deployment: Deployment, window: Window) -> None:
        self.window = window
        self.link = BUSY
        self.num_running = 2
        self.is_silent = False
        self.address = free_address()
        self.grpc = free_address()
        self._deployment = deployment
        self.manager: Manager
        self.client: ManagerClient
        self.east: Reporter
        self._num_requests = 0

    async def start(self) -> None:
        await self._deployment.start_redis()
        await self.start_manager()
        self.client = self._deployment.client(self.manager)
        start = self._deployment.reporter
        east = self.east = start(
            "p1", self.manager, cluster="east", kind="prfaas", role="prefill", figures=self.prefill_figures
        )
        west = start("d1", self.manager, cluster="west", role="decode", figures=self.decode_figures)
        for reporter in (east, west):
            self._deployment.run(reporter)
            reporter.publish(stored(LAYOUT, chain_of(320), 320))
        await until(lambda: self.manager.world.index.num_blocks() == 42, what="what both nodes hold")
        await self.window.page.goto(f"http://{self.address}/")

    async def start_manager(self) -> None:
        self.manager = await self._deployment.start_manager(
            name="west-manager", http_listen=self.address, listen=self.grpc, threshold_tokens=500
        )

    def operator(self) -> ManagerClient:
        return self._deployment.client(self.manager, name="operator", deadline_seconds=PATIENCE_SECONDS)

    async def restart_manager(self) -> None:
        await self._deployment.stop_manager(self.manager)
        await until_true(lambda: self.says("lost"))
        await self.start_manager()
        await until_true(lambda: self.says("live"))

    async def says(self, state: str) -> bool:
        return await self.window.page.locator("#connection").get_attribute("data-state") == state

    def prefill_figures(self) -> Figures:
        load = EngineLoad(InstanceId("p1-engine"), self.num_running, 1, 0.5, is_silent=self.is_silent)
        return Figures(links=(self.link,), engines=(load,))

    def decode_figures(self) -> Figures:
        return Figures(engines=(EngineLoad(InstanceId("d1-engine"), 7, 0, 0.25),))

    async def ask(self, num_tokens: int) -> None:
        await self.report(await self.route(num_tokens))

    async def route(self, num_tokens: int) -> pb.RouteResponse:
        self._num_requests += 1
        request_id = self._num_requests.to_bytes(8, "big")
        request = route_request(chain_of(num_tokens), request_id=request_id, session=f"s{num_tokens}")
        return await self.client.route(request)

    async def report(self, response: pb.RouteResponse) -> None:
        """Report the end of the last routed request."""
        ended = pb.ReportRequestsRequest.Answered(
            decision_id=self._num_requests.to_bytes(8, "big"),
            route=response.route,
            reason=response.reason,
            status=200,
            ttft_seconds=2.5,
            decide_seconds=0.5,
        )
        reports = RequestReports(self.client)
        reports.add(ended)
        await reports.send()

    async def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics by name."""
        async with aiohttp.ClientSession() as session, session.get(f"http://{self.address}/metrics") as response:
            text = await response.text()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {_written(sample.name, sample.labels): sample.value for sample in samples}

    async def differs(self, panel: str) -> dict[str, tuple[float, float | None]]:
        """Return the figures of a panel that differ from the metrics, as (shown, metric)."""
        shown, found = await self.window.figures(panel), await self.metrics()
        assert shown, f"{panel} shows no figure"
        return {name: (value, found.get(name)) for name, value in shown.items() if found.get(name) != value}

    async def until_right(self, panel: str) -> None:
        async def is_right() -> bool:
            return not await self.differs(panel)

        try:
            await until_true(is_right)
        except AssertionError:
            assert await self.differs(panel) == {}, panel

    async def event(self, kind: str) -> str:
        return await self.window.text(f"#events li[data-kind='{kind}']")

    async def starts(self) -> list[str]:
        """Return the starts of the events, as they are listed."""
        times = self.window.page.locator("#events time")
        return list(await times.evaluate_all("all => all.map((time) => time.dateTime)"))

    async def lines(self, *steps: tuple[str, int, int, str]) -> list[str]:
        """Return the lines of a path whose t moves in steps of (kind, from, to, cause), one a second."""
        script = """async (steps) => {
            const { incidents, movementInWords, movements } = await import("/dashboard/timeline.js");
            const [incident] = incidents(steps.map(([kind, from, to, detail], at) =>
                ({ at, kind, subject: "east → west", detail, thresholds: [from, to] })).reverse());
            return movements(incident).map(movementInWords);
        }"""
        return list(await self.window.page.evaluate(script, steps))

    async def row_of(self, table: str, words: str) -> str:
        return await self.window.text(f"#{table} tbody tr:has-text('{words}')")


def _written(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if labels else name


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        window = await (await stack.enter_async_context(chromium()))()
        directory: Path = tmp_path_factory.mktemp("dashboard")
        stage = Stage(await stack.enter_async_context(Deployment(directory)), window)
        await stage.start()
        await stage.ask(400)
        await stage.ask(1000)
        await until_true(lambda: _has(window.text("#map svg"), "east", "west", "carries"))
        yield stage


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def quiet(stage: Stage) -> AsyncIterator[None]:
    """Whatever a test does: nothing goes wrong in the page, and nothing is asked of anybody else."""
    yield
    assert stage.window.errors == []
    assert [url for url in stage.window.requests if not url.startswith(f"http://{stage.address}/")] == []


@pytest.mark.parametrize("panel", WITH_FIGURES)
async def test_panel_agrees_with_the_metrics(stage: Stage, panel: str) -> None:
    await stage.until_right(panel)


async def test_changed_link_shows_at_once(stage: Stage) -> None:
    stage.link = replace(BUSY, bytes_per_second=100e6, capacity_bytes_per_second=250e6)
    await until_true(lambda: _has(stage.row_of("paths-table", "east → west"), "800 Mbit/s", "2.0 Gbit/s", "40 %"))
    await stage.until_right("paths")
    stage.link = replace(BUSY, retransmit_ratio=0.5)  # TCP retransmits without losses too, when a queue is full.
    await until_true(lambda: _has(stage.row_of("paths-table", "east → west"), "congested (retransmissions)"))
    cause = ("t of east → west", "500 → 1,000", "50 % of the bytes sent in half a second were retransmissions", "3 %")
    await until_true(lambda: _has(stage.window.text(TILE_OF_T), *cause))
    stage.link = replace(BUSY, is_down=True)
    await until_true(lambda: _has(stage.row_of("paths-table", "east → west"), "down"))
    await until_true(lambda: _has(stage.event("link_down"), "east → west"))
    stage.link = BUSY
    await until_true(lambda: _has(stage.row_of("paths-table", "east → west"), "carries"))
    await until_true(lambda: _has(stage.window.text(TILE_OF_T), *cause, "→ 500: link below 60 %"))
    await until_true(lambda: _has(stage.event("congestion"), " to ", *cause[1:]))
    assert "still going" not in await stage.event("congestion")
    assert await _has(stage.window.text("#notices"), "Incidents ended", "Threshold raised east → west")


async def test_each_step_of_t_shows_with_its_own_cause(stage: Stage) -> None:
    steps = (
        ("congestion", 3973, 7946, "3.7 % lost"),
        ("congestion", 7946, 15892, "3.7 % lost"),
        ("congestion", 5246, 10492, "queue 1.5 s"),
        ("congestion", 10492, 5246, "calm"),
        ("calm", 5246, 2623, "calm"),
    )
    assert await stage.lines(*steps) == [
        "3,973 → 7,946 → 15,892: 3.7 % lost",
        "5,246 (by a new plan) → 10,492: queue 1.5 s",
        "10,492 → 5,246 → 2,623: calm",
    ]


async def test_silence_shows_while_it_lasts_and_afterwards(stage: Stage) -> None:
    stage.is_silent = True
    await until_true(lambda: _has(stage.window.text("#health-title"), "Degraded", "p1-engine", "since"))
    await until_true(lambda: _has(stage.event("silent"), "p1-engine", "still going"))
    stage.is_silent = False
    await until_true(lambda: _has(stage.window.text("#health-title"), "Healthy since"))
    await until_true(lambda: _has(stage.event("silent"), " to ", "gets requests again"))
    recent = ("Incidents ended in the last 15 min", "Instance silent p1-engine", " s)")
    assert await _has(stage.window.text("#notices"), *recent)


async def test_latest_start_is_first(stage: Stage) -> None:
    stage.is_silent = True
    await until_true(lambda: _has(stage.event("silent"), "still going"))
    operator = stage.operator()
    await operator.operate("SetRole", pb.SetRoleRequest(node="d1", role="both"))
    await until_true(lambda: _has(stage.event("role_changed"), "decode → both"))
    await operator.operate("SetRole", pb.SetRoleRequest(node="d1", role="announced"))
    await until_true(lambda: _has(stage.event("role_changed"), "both → decode"))
    stage.is_silent = False
    await until_true(lambda: _has(stage.event("silent"), " to "))
    starts = await stage.starts()
    assert len(starts) > 3 and starts == sorted(starts, reverse=True)


async def test_all_events_can_be_reached(stage: Stage) -> None:
    page, operator = stage.window.page, stage.operator()
    for role in ("both", "announced") * 5:
        await operator.operate("SetRole", pb.SetRoleRequest(node="d1", role=role))
    button = page.locator("#events-all")
    await until_true(lambda: _has(button.text_content(), "Show all"))
    await until_true(lambda: _all_events_are_counted(stage))
    assert await button.get_attribute("aria-expanded") == "false"
    await button.focus()
    await page.keyboard.press("Enter")
    last = page.locator("#events li").last
    frame = await page.locator(".events").bounding_box()
    box = await last.bounding_box()
    assert frame and box and box["y"] + box["height"] <= frame["y"] + frame["height"] + 1
    await button.click()
    await page.locator(".events").focus()
    await page.keyboard.press("End")
    await until_true(lambda: _is_scrolled(page))


async def _all_events_are_counted(stage: Stage) -> bool:
    number = await stage.window.page.locator("#events li").count()
    words = f"{number} events in the last 15 min", f"Show all {number} events"
    return await _has(stage.window.text("#timeline"), *words)


async def _is_scrolled(page: Page) -> bool:
    return bool(await page.locator(".events").evaluate("one => one.scrollTop > 0"))


async def test_page_shows_the_present_time_and_its_zone(stage: Stage) -> None:
    script = """() => {
        const clock = document.getElementById("clock");
        const [shown, zone] = [clock.textContent.match(/\\d\\d:\\d\\d:\\d\\d/)[0], clock.textContent.split(" ").at(-1)];
        const written = new Date(clock.dateTime).toLocaleTimeString("en-GB", { timeZoneName: "short" });
        return [Math.abs(Date.now() - Date.parse(clock.dateTime)), written === `${shown} ${zone}`];
    }"""
    late, is_local = await stage.window.page.evaluate(script)
    assert late < 4000 and is_local


async def test_link_that_is_full_for_a_moment_is_no_strain(stage: Stage) -> None:
    stage.link = replace(BUSY, bytes_per_second=120e6)
    await until_true(lambda: _has(stage.row_of("paths-table", "east → west"), "960 Mbit/s", "96 %"))
    stage.link = BUSY  # Before the mean use raises t.
    assert not await _has(stage.window.text("#health"), "full")


async def test_idle_link_keeps_one_capacity_in_all_panels(stage: Stage) -> None:
    stage.link = BUSY
    await until_true(lambda: _has(stage.row_of("paths-table", "east → west"), "1.0 Gbit/s"))
    stage.link = replace(BUSY, bytes_per_second=0.0, capacity_bytes_per_second=0.0)
    await until_true(lambda: _has(stage.row_of("paths-table", "east → west"), "0 bit/s"))
    for panel in ("#paths-table tbody", "#paths-charts .legend", ".tile:has-text('Fullest link')"):
        await until_true(lambda panel=panel: _has(stage.window.text(panel), "1.0 Gbit/s"))  # type: ignore[misc]
    stage.link = BUSY


async def test_ordered_role_shows_with_the_former_one(stage: Stage) -> None:
    operator = stage.operator()
    await operator.operate("SetRole", pb.SetRoleRequest(node="d1", role="both"))
    await until_true(lambda: _has(stage.event("role_changed"), "d1-engine", "decode → both"))
    await until_true(lambda: _has(stage.event("operator"), "d1", "set_role both by operator: done"))
    await operator.operate("SetRole", pb.SetRoleRequest(node="d1", role="announced"))
    await until_true(lambda: _has(stage.event("role_changed"), "d1-engine", "both → decode"))


async def test_each_link_shows_the_report_of_its_agent(stage: Stage) -> None:
    await stage.window.page.locator("summary", has_text="Each link between two nodes").click()
    figures = ("up", "320 Mbit/s", "1.0 Gbit/s", "1.0 MiB", "90 ms", "80 ms", "0.1 %", "8")
    stage.link = replace(BUSY, rtt_seconds=0.09)
    await until_true(lambda: _has(stage.row_of("links-table", "p1"), "d1", *figures))
    stage.link = replace(BUSY, is_down=True)
    await until_true(lambda: _has(stage.row_of("links-table", "p1"), "d1", "down"))
    stage.link = replace(BUSY, congestion="queue")
    await until_true(lambda: _has(stage.row_of("links-table", "p1"), "d1", "choked (queue)"))
    stage.link = BUSY
    await until_true(lambda: _has(stage.row_of("links-table", "p1"), "d1", "up"))


async def test_request_shows_with_session_prefix_and_explanation(stage: Stage) -> None:
    page = stage.window.page
    await stage.ask(640)
    await until_true(
        lambda: _has(stage.row_of("requests-table", "s640"), "local", "short", "640", "320500", "as decided", "2.5 s")
    )
    await until_true(lambda: _has(stage.row_of("sessions-table", "s640"), "d1", "640 tokens"))
    await until_true(lambda: _has(stage.row_of("prefixes-table", "tiny"), "320", "d1, p1"))
    await stage.until_right("routes")
    button = page.locator("#requests-table tr:has-text('s640') button")
    await button.focus()
    await page.keyboard.press("Enter")
    await page.locator("#explanation[open]").wait_for()
    words = (
        "its uncached tokens do not exceed the threshold",
        "Decide",
        "500 ms",
        "Engine",
        "2.0 s",
        "d1-engine",
        "p1-engine",
    )
    await until_true(lambda: _has(stage.window.text("#explanation"), *words))
    assert await stage.window.faults() == []
    await page.keyboard.press("Escape")
    await page.locator("#explanation[open]").wait_for(state="hidden")


async def test_latest_request_is_explained_with_its_end(stage: Stage) -> None:
    page = stage.window.page
    response = await stage.route(1100)
    await until_true(lambda: _has(stage.window.text("#latest-request"), "Latest remote request", "780 uncached tokens"))
    await stage.report(response)
    await until_true(lambda: _has(stage.row_of("requests-table", "s1100"), "as decided"))
    await page.locator("#latest-request button").click()
    await page.locator("#explanation[open]").wait_for()
    assert await _has(stage.window.text("#explanation"), "First token after 2.5 s")
    await page.keyboard.press("Escape")
    await page.locator("#explanation[open]").wait_for(state="hidden")


async def test_chart_can_be_read_with_the_keyboard(stage: Stage) -> None:
    page = stage.window.page
    await page.locator("#threshold-chart .chart").focus()
    await page.keyboard.press("End")
    await until_true(lambda: _has(stage.window.text("#threshold-chart .readout"), "t 500"))
    await page.keyboard.press("Escape")


async def test_map_shrinks_with_the_window(stage: Stage) -> None:
    """It is drawn anew a frame after its window became narrower."""
    script = """() => {
        document.querySelector("#map-drawing svg").setAttribute("width", 4000);
        return document.documentElement.scrollWidth - document.documentElement.clientWidth;
    }"""
    assert await stage.window.page.evaluate(script) == 0


async def test_page_reconnects_to_the_next_manager(stage: Stage) -> None:
    await stage.restart_manager()
    stage.window.forget_unanswered()
    await until_true(lambda: _has(stage.window.text("#map svg"), "east", "west", "carries"))
    for panel in WITH_FIGURES:
        await stage.until_right(panel)


async def _has(text: object, *words: str) -> bool:
    found = await text  # type: ignore[misc]
    return all(word in found for word in words)
