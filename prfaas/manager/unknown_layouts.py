"""Models that are served while no node has registered a layout of theirs: each is counted, and told of now and then."""

from __future__ import annotations

from prfaas import logs, metrics

REPEAT_SECONDS = 300.0  # between two warnings of one model
_log = logs.get("manager.routing")


class UnknownLayouts:
    """Times are seconds on a clock that only goes forward."""

    def __init__(self) -> None:
        self._warned_at: dict[str, float] = {}  # by model; models are those of registered engines

    def note(self, model: str, now: float) -> None:
        """A request for this model was routed as if nothing of it were cached anywhere."""
        metrics.MANAGER_WITHOUT_LAYOUT.labels(model=model).inc()
        if now < self._warned_at.get(model, -REPEAT_SECONDS) + REPEAT_SECONDS:
            return
        self._warned_at[model] = now
        _log.warning("layout.unknown", model=model, effect="nothing counts as cached: see the connector of its engines")
