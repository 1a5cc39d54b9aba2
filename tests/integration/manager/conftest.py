from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.agent_deployment import AgentDeployment, running_agents
from tests.support.deployment import Deployment


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    async with Deployment(tmp_path) as started:
        yield started


@pytest.fixture
async def site(deployment: Deployment, tmp_path: Path) -> AsyncIterator[AgentDeployment]:
    async with running_agents(deployment, tmp_path) as made:
        yield made
