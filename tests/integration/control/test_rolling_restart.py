"""Rolling restart of every component under load, as docs/deploy.md describes: no request fails."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.integration.control.redundant_deployment import RedundantDeployment, load, until_more
from tools.processes import Children
from tools.stack import Stack


@pytest.fixture
def site(tmp_path: Path) -> Iterator[RedundantDeployment]:
    with Children(tmp_path) as children, ExitStack() as relays:
        stack = Stack(children, tmp_path)
        made = RedundantDeployment(children, stack, tmp_path)
        made.start(stack, relays)
        yield made


@pytest.mark.soak  # Half a minute, in which eight processes are replaced.
@pytest.mark.timeout(300)
async def test_no_request_fails_while_every_component_is_restarted(site: RedundantDeployment) -> None:
    await site.is_whole()
    before = {engine.process.pid for engine in (site.manager, site.doors[0].child, *site.engines.values())}
    async with load(site) as outcomes:
        for restart in (
            site.restart_manager,
            site.restart_router,
            partial(site.restart_node, "w0"),
            partial(site.restart_node, "e0"),
        ):
            await restart()
            await site.is_whole()
            await until_more(outcomes)
    assert Counter(outcome.error for outcome in outcomes if not outcome.is_whole) == {}
    assert {outcome.reason for outcome in outcomes} >= {"short", "long"}
    after = {engine.process.pid for engine in (site.manager, site.doors[0].child, *site.engines.values())}
    assert len(before & after) == 2, "w1 and e1 have been left alone"
