from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.manager.deployment import Deployment
from tests.integration.manager.site import Site, running_site


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    async with Deployment(tmp_path) as started:
        yield started


@pytest.fixture
async def site(deployment: Deployment, tmp_path: Path) -> AsyncIterator[Site]:
    async with running_site(deployment, tmp_path) as made:
        yield made
