from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.agent.running import Agents
from tests.integration.manager.deployment import SECRET, Deployment
from tests.integration.manager.site import Site


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    async with Deployment(tmp_path) as started:
        yield started


@pytest.fixture
async def site(deployment: Deployment, tmp_path: Path) -> AsyncIterator[Site]:
    made = Site(deployment, await deployment.start_manager(), Agents(tmp_path, SECRET))
    yield made
    await made.close()
