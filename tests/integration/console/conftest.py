from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.agent.conftest import agents
from tests.integration.manager.conftest import deployment
from tests.support.agent_deployment import AgentDeployment, running_agents
from tests.support.deployment import Deployment

__all__ = ["agents", "deployment", "site"]


@pytest.fixture
async def site(deployment: Deployment, tmp_path: Path) -> AsyncIterator[AgentDeployment]:
    async with running_agents(deployment, tmp_path) as made:
        yield made
