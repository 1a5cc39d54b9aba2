from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.agent.conftest import agents
from tests.integration.manager.conftest import deployment
from tests.integration.manager.deployment import Deployment
from tests.integration.manager.site import AgentDeployment, running_agents

__all__ = ["agents", "deployment", "site"]


@pytest.fixture
async def site(deployment: Deployment, tmp_path: Path) -> AsyncIterator[AgentDeployment]:
    async with running_agents(deployment, tmp_path) as made:
        yield made
