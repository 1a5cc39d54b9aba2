"""The live instances of each model as the scheduler sees them: looked up once, until something is heard of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.index.membership import Engine, EngineLoad, Member
from prfaas.manager.load import AssignedLoad
from prfaas.manager.world import World
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.snapshot import InstanceState
from prfaas.types import InstanceId

MAX_COLD_USES = 4096  # instances remembered: with names that change at each start they would be without end
_NOTHING = pb.InFlight()


@dataclass(frozen=True, eq=False)
class Place:
    """An instance and the node it stands on, with the load that it reported last."""

    engine: Engine
    member: Member
    load: EngineLoad


class _Changing(NamedTuple):
    """What of an instance's state changes from one request to the next."""

    num_assigned: int
    num_in_flight: int
    num_in_flight_tokens: int
    last_cold_use: float | None


Places = Mapping[InstanceId, Place]


class Instances:
    """Who serves what, and how busy they are. Times are seconds on `clock`, which only goes forward."""

    def __init__(self, world: World, *, clock: Callable[[], float]) -> None:
        self._world = world
        self._clock = clock
        self._cold_uses: dict[InstanceId, float] = {}
        self._assigned = AssignedLoad()
        self._known: dict[str, Places] = {}  # by model
        self._known_of: tuple[Sequence[Member], int, frozenset[InstanceId]] = ((), -1, frozenset())
        self._states: dict[Place, tuple[_Changing, InstanceState]] = {}

    def serving(self, model: str) -> Places:
        """The live instances that serve a model; those that drain only where there are no others."""
        live, version, turning = self._world.live(), self._world.version, self._world.turning
        if live is not self._known_of[0] or (version, turning) != self._known_of[1:]:
            self._known_of = (live, version, turning)
            self._known.clear()
            self._states.clear()
        places = self._known.get(model)
        if places is None:
            places = self._places(model, live)
            if places:
                self._known[model] = places
        return places

    def _places(self, model: str, live: Iterable[Member]) -> Places:
        places = {
            engine.instance: Place(engine, member, _load(engine.instance, member))
            for member in live
            for engine in member.node.engines
            if engine.model == model
        }
        leaving, draining = self._world.leaving, self._world.draining
        staying = {
            name: place
            for name, place in places.items()
            if place.member.node.name not in leaving and name not in draining
        }
        return staying if any(_decodes(place) for place in staying.values()) else places

    def states(
        self, places: Places, *, cluster: str = "", in_flight: Iterable[pb.InFlight] = ()
    ) -> tuple[InstanceState, ...]:
        """How they stand; only `cluster` decodes, when the asker names one. `in_flight` is what the asker has sent."""
        sent = {its.instance: its for its in in_flight}
        assigned, cold_uses = self._assigned.counts(now=self._clock()), self._cold_uses
        return tuple(
            [
                self._state(
                    place,
                    _Changing(
                        assigned.get(name, 0),
                        (its := sent.get(name, _NOTHING)).num_requests,
                        its.num_tokens,
                        cold_uses.get(name),
                    ),
                )
                for name, place in places.items()
                if not cluster or place.member.node.cluster == cluster or place.member.node.cluster_kind == "prfaas"
            ]
        )

    def _state(self, place: Place, changing: _Changing) -> InstanceState:
        known = self._states.get(place)
        if known is not None and known[0] == changing:
            return known[1]
        state = _instance_state(place, changing)
        self._states[place] = (changing, state)
        return state

    def assign(self, request: bytes, instances: Iterable[InstanceId], *, now: float) -> None:
        """A request runs on these instances, which no report of theirs can say yet."""
        self._assigned.assign(request, instances, now=now)

    def note_cold_use(self, instance: InstanceId, now: float) -> None:
        """It decodes a request that nobody had anything of."""
        self._cold_uses.pop(instance, None)  # so that the one used longest ago comes first
        self._cold_uses[instance] = now
        if len(self._cold_uses) > MAX_COLD_USES:
            del self._cold_uses[next(iter(self._cold_uses))]


def _load(instance: InstanceId, member: Member) -> EngineLoad:
    load = next((its for its in member.figures.engines if its.instance == instance), None)
    return load or EngineLoad(instance, 0, 0, 0.0)


def _decodes(place: Place) -> bool:
    return place.member.node.cluster_kind == "pd" and place.engine.role != "prefill"


def _instance_state(place: Place, changing: _Changing) -> InstanceState:
    engine, node, load = place.engine, place.member.node, place.load
    return InstanceState(
        instance=engine.instance,
        cluster=node.cluster,
        cluster_kind=node.cluster_kind,
        role=engine.role,
        agent=node.name,
        num_requests=load.num_running + load.num_waiting + changing.num_assigned,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        kv_usage_ratio=load.kv_usage_ratio,
        num_in_flight=changing.num_in_flight,
        num_in_flight_tokens=changing.num_in_flight_tokens,
        last_cold_use=changing.last_cold_use,
    )
