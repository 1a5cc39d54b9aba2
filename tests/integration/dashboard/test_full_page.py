"""Dashboard with every optional setting on: deployment file, egress price, sessions, tenants, a silent engine."""

import math
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from prfaas.index.membership import EngineLoad, Figures, LinkFigures
from prfaas.manager.daemon import Manager
from prfaas.manager.state.world import OFFLOAD_NOTHING
from prfaas.router.routing.reports import RequestReports
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.types import AgentName, InstanceId
from tests.integration.dashboard.browser import Window, chromium, until_true
from tests.integration.manager.test_routing import route_request
from tests.support.deployment import Deployment, chain_of, hybrid_layout, stored
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]
FILE = """
model: internal-1t-hybrid
trace: lognormal
currency: EUR
prfaas:
  - {name: east-coast-datacenter-7, profile: h200-internal-1t, instances: 9, bandwidth: 200Mbps, egress_price: 0.05}
pd:
  - {name: west, profile: h20-internal-1t, instances: 9}
"""
EAST = "east-coast-datacenter-7"
# The estimate exceeds the 200 Mbit/s of the file.
LINK = LinkFigures(AgentName("d1"), 12.5e6, 35.5e6, 0.08, 0.08, 0, 0.001, num_connections=8)
NUM_REQUESTS = 300
MAX_FIRST_VIEW_BYTES = 300_000
MAX_FIRST_VIEW_SECONDS = 1.0
NUM_LOADS = 5


def recorded_trace() -> list[tuple[str, float]]:
    """Return routes and times to the first token."""
    generator = random.Random(7)
    routes = [generator.choice(("remote", "local")) for _ in range(NUM_REQUESTS)]
    return [(route, generator.lognormvariate(0.0 if route == "remote" else -1.5, 0.6)) for route in routes]


async def _report(deployment: Deployment, manager: Manager) -> None:
    """Route some prompts, and report a recorded trace."""
    client = deployment.client(manager)
    reports = RequestReports(client)
    for number, (route, ttft) in enumerate(recorded_trace()):
        decision_id = b""
        if number < 12:
            decision_id = number.to_bytes(8, "big")
            chain, tenant = chain_of(400 + number), ("acme", "globex")[number % 2]
            await client.route(route_request(chain, request_id=decision_id, session=f"s{number}", tenant=tenant))
        reports.add(
            pb.ReportRequestsRequest.Answered(
                decision_id=decision_id,
                route=route,
                reason="long" if route == "remote" else "short",
                status=200,
                ttft_seconds=ttft,
                decide_seconds=0.01,
                prefill_seconds=ttft / 2 if route == "remote" else 0.0,
                outcome="completed",
            )
        )
    await reports.send()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def managers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Manager, Manager]]:
    """Yield the manager of the page, and one whose deployment file names no currency."""
    directory: Path = tmp_path_factory.mktemp("dashboard")
    (directory / "deployment.yaml").write_text(FILE)
    (directory / "unnamed.yaml").write_text(FILE.replace("currency: EUR\n", ""))
    layout = hybrid_layout()
    async with Deployment(directory) as deployment:
        await deployment.start_redis()
        manager = await deployment.start_manager(name="west-manager", deployment=directory / "deployment.yaml")
        second = await deployment.start_manager(name="east-manager", deployment=directory / "unnamed.yaml")
        silent = Figures(engines=(EngineLoad(InstanceId("i1-engine"), 0, 0, 0.0, is_silent=True),))
        await deployment.node("i1", manager, cluster="west", role="prefill", figures=silent)
        await deployment.node("d1", manager, cluster="west", role="decode", holds=stored(layout, chain_of(320), 320))
        figures = Figures(links=(LINK,), engines=(EngineLoad(InstanceId("p1-engine"), 2, 1, 0.5),))
        await deployment.node("p1", manager, cluster=EAST, kind="prfaas", role="prefill", figures=figures)
        await until(lambda: manager.world.plan is not None and len(manager.world.live()) == 3, what="a plan")
        await _report(deployment, manager)
        yield manager, second


@pytest.fixture(scope="module")
def manager(managers: tuple[Manager, Manager]) -> Manager:
    return managers[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def window(manager: Manager) -> AsyncIterator[Window]:
    async with AsyncExitStack() as stack:
        window = await (await stack.enter_async_context(chromium()))()
        await window.page.goto(f"http://{manager.http_address}/")
        await until_true(lambda: _has(window, "#health-title", "i1-engine"))
        yield window
        assert window.errors == []


async def _has(window: Window, selector: str, *words: str) -> bool:
    text = await window.text(selector)
    return all(word in text for word in words)


async def test_percentiles_are_those_of_the_recorded_trace(window: Window) -> None:
    for route in ("remote", "local"):
        ordered = sorted(ttft for kind, ttft in recorded_trace() if kind == route)
        expected = [ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95, 0.99)]
        cells = window.page.locator(f"#ttft-table tr[data-key='{route}'] [data-exact]")
        assert [
            float(value) for value in await cells.evaluate_all("all => all.map(cell => cell.dataset.exact)")
        ] == expected


async def test_silent_engine_makes_the_service_degraded(window: Window) -> None:
    assert await window.page.locator("#health").get_attribute("data-mood") == "bad"
    assert await _has(window, "#health-title", "Degraded", "i1-engine")


async def test_capacity_is_at_most_what_the_deployment_file_allows(window: Window) -> None:
    row = await window.text("#paths-table tbody tr")
    assert "200 Mbit/s" in row and "284 Mbit/s" not in row


async def test_egress_cost_shows_per_hour_and_today_with_its_start_and_currency(window: Window) -> None:
    words = ("EUR", "since", "when this manager started", "at the mean rate of the last minute", "EUR per hour")
    await until_true(lambda: _has(window, ".tile:has-text('Egress cost today')", *words))
    assert not await _has(window, ".tile:has-text('Egress cost today')", " 0.00 EUR per hour")


async def test_cost_without_a_named_currency_says_how_to_name_it(
    window: Window, managers: tuple[Manager, Manager]
) -> None:
    assert window.page.context.browser is not None
    unnamed = Window(await window.page.context.browser.new_page())
    await unnamed.page.goto(f"http://{managers[1].http_address}/dashboard/")
    words = ("per hour. The currency is that of egress_price", "currency in the deployment file")
    await until_true(lambda: _has(unnamed, ".tile:has-text('Egress cost today')", *words))
    await unnamed.page.close()


async def test_estimate_without_offloading_shows_beside_the_present_one(window: Window) -> None:
    await until_true(lambda: _has(window, ".tile:has-text('If all were local')", "with offloading"))


async def test_page_links_to_the_other_manager_once_it_writes_a_cluster(window: Window, manager: Manager) -> None:
    assert await _has(window, "#manager-name", "west-manager")
    owners = await manager.replication.owners()
    assert owners and all(f"http://{manager.http_address}/" in owner for owner in owners.values())


async def test_filter_by_tenant_leaves_the_others_out(window: Window) -> None:
    select = window.page.locator("#controls [name=tenant]")
    await select.select_option("globex")
    await until_true(lambda: _has(window, "#ttft-words", "The filters leave out 294 requests."))
    assert await window.page.locator("#requests-table tbody tr").count() == 6
    await select.select_option("")
    await until_true(lambda: _has(window, "#ttft-table tr[data-key='local']", str(_count("local"))))


def _count(route: str) -> int:
    return sum(kind == route for kind, _ in recorded_trace())


FIRST_SCREEN = {
    "is it healthy": ("#health-title", "Degraded"),
    "why did t change": (".tile:has-text('Threshold t')", "fills first"),
    "which link is full": (".tile:has-text('Fullest link')", f"{EAST} → west"),
    "why did this request go there": ("#latest-request", "uncached tokens, t"),
    "what did today's egress cost": (".tile:has-text('Egress cost today')", "per hour"),
    "what happened then": ("#events li >> nth=0", ":"),
}


@pytest.mark.parametrize("question", FIRST_SCREEN)
async def test_first_screen_answers(window: Window, question: str) -> None:
    selector, words = FIRST_SCREEN[question]
    await window.page.set_viewport_size({"width": 1440, "height": 1000})
    await until_true(lambda: _has(window, selector, words))
    box = await window.page.locator(selector).first.bounding_box()
    assert box is not None and box["y"] + box["height"] <= 1000


async def test_panels_without_requests_say_so(window: Window, manager: Manager) -> None:
    assert window.page.context.browser is not None
    empty = Window(await window.page.context.browser.new_page())
    await empty.page.goto(f"http://{manager.http_address}/dashboard/#cluster=nowhere")
    await until_true(lambda: _has(empty, "#phases-bars", "No completed request"))
    assert await _has(empty, ".tile:has-text('TTFT, remote')", "none")
    assert "NaN" not in await empty.text("main")
    await empty.page.close()


async def test_threshold_without_limit_is_shown_in_words(window: Window, manager: Manager) -> None:
    plan = manager.world.plan
    assert plan is not None
    manager.world.plan = replace(plan, threshold_tokens=OFFLOAD_NOTHING)
    try:
        await until_true(lambda: _has(window, ".tile:has-text('Threshold t')", "no limit"))
        assert "2,147,483,647" not in await window.text("main")
    finally:
        manager.world.plan = plan


@pytest.mark.parametrize("width", [360, 390, 768, 1440, 3840])
async def test_page_fits_each_width(window: Window, width: int) -> None:
    await window.page.set_viewport_size({"width": width, "height": 900})
    await window.page.locator("details").evaluate_all("all => all.forEach(one => one.open = true)")
    await until_true(lambda: _fits(window), seconds=5.0)  # Charts follow their frame one animation frame later.


async def _fits(window: Window) -> bool:
    return await window.overflow() == 0


@pytest.mark.parametrize("colors", ["light", "dark"])
async def test_page_is_accessible(window: Window, colors: str) -> None:
    await window.page.set_viewport_size({"width": 1440, "height": 900})
    await window.page.locator("#theme").select_option(colors)
    assert await window.faults() == []


async def test_first_view_is_small(window: Window, manager: Manager) -> None:
    num_bytes, _ = await _first_view(window, f"http://{manager.http_address}/dashboard/")
    assert 0 < num_bytes < MAX_FIRST_VIEW_BYTES


@pytest.mark.soak
async def test_first_view_is_quick(window: Window, manager: Manager) -> None:
    """The quickest of some loads counts, since the machine does other work too."""
    url = f"http://{manager.http_address}/dashboard/"
    loads = [await _first_view(window, url) for _ in range(NUM_LOADS)]
    assert min(seconds for _, seconds in loads) < MAX_FIRST_VIEW_SECONDS, loads


async def _first_view(window: Window, url: str) -> tuple[int, float]:
    """Return the bytes that a new browser profile receives until the tiles show, and the seconds."""
    assert window.page.context.browser is not None
    page = await window.page.context.browser.new_page()
    session = await page.context.new_cdp_session(page)
    await session.send("Network.enable")
    received: list[int] = []
    session.on("Network.dataReceived", lambda event: received.append(event["dataLength"]))
    await page.goto(url)
    await page.locator(".tile").first.wait_for()
    milliseconds: float = await page.evaluate("performance.now()")
    await page.close()
    return sum(received), milliseconds / 1000
