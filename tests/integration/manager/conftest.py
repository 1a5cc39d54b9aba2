from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.manager.deployment import Deployment
from tests.integration.manager.site import AgentDeployment, running_agents


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    async with Deployment(tmp_path) as started:
        yield started


@pytest.fixture
async def site(deployment: Deployment, tmp_path: Path) -> AsyncIterator[AgentDeployment]:
    async with running_agents(deployment, tmp_path) as made:
        yield made
