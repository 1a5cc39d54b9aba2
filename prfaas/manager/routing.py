"""From the manager's world to the scheduler's snapshot, and from its decision to a granted route."""

from __future__ import annotations

from collections.abc import Callable

from prfaas.errors import IndexRefusal
from prfaas.manager.config import ManagerConfig
from prfaas.manager.world import World
from prfaas.rpc.generated import manager_pb2 as pb


class Routing:
    """Decides requests; the decision itself is the scheduler's."""

    def __init__(self, config: ManagerConfig, *, world: World, secret: bytes, wall_clock: Callable[[], float]) -> None:
        self._config = config
        self._world = world
        self._wall_clock = wall_clock

    @property
    def threshold_tokens(self) -> int:
        return self._config.threshold_tokens

    def route(self, request: pb.RouteRequest) -> pb.RouteResponse:
        """Where a request runs."""
        raise IndexRefusal("no_route", "nobody can serve it")
