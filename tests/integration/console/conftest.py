from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.agent.running import Agents
from tests.integration.manager.conftest import deployment
from tests.integration.manager.deployment import SECRET, Deployment
from tests.integration.manager.site import Site

__all__ = ["deployment", "site"]


@pytest.fixture
async def site(deployment: Deployment, tmp_path: Path) -> AsyncIterator[Site]:
    """Its nodes are not taken for dead while a command starts, however slow this machine is."""
    made = Site(deployment, await deployment.start_manager(expiry_seconds=60.0), Agents(tmp_path, SECRET))
    yield made
    await made.close()
