from __future__ import annotations

from tests.integration.manager.conftest import deployment, site

__all__ = ["deployment", "site"]
