"""Whether a request whose KV is under way gets engine blocks before the KV is there: the setting `admission` (pure)."""

from __future__ import annotations

from collections.abc import Callable

from prfaas.connector.settings import ConnectorSettings


def may_preallocate(settings: ConnectorSettings, free_block_ratio: Callable[[], float]) -> Callable[[], bool]:
    """The rule that `settings.admission` names; `auto` looks at `free_block_ratio` each time it is asked."""
    rules: dict[str, Callable[[], bool]] = {
        "wait": lambda: False,
        "preallocate": lambda: True,
        "auto": lambda: free_block_ratio() >= settings.plenty_ratio,
    }
    return rules[settings.admission]
