"""Requests that were routed but that no report of an engine's load can include yet, so that a burst spreads."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.index.membership import Engine, EngineLoad, Member
from prfaas.manager.state.world import World
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.snapshot import InstanceState
from prfaas.types import InstanceId

REPORT_SECONDS = 2.0  # agents report loads each second; after two they have seen what we assigned


class AssignedLoad:
    """Assignments of the last `REPORT_SECONDS`, by request. Times are seconds on a clock that only goes forward."""

    def __init__(self) -> None:
        self._assigned: OrderedDict[bytes, tuple[float, tuple[InstanceId, ...]]] = OrderedDict()  # oldest first
        self._counts: Counter[InstanceId] = Counter()

    def assign(self, request: bytes, instances: Iterable[InstanceId], *, now: float) -> None:
        """A request runs on these instances; asked again, it runs there instead of where it was assigned before."""
        self._withdraw(request)
        self._assigned[request] = (now, tuple(instances))
        self._counts.update(self._assigned[request][1])

    def counts(self, *, now: float) -> Mapping[InstanceId, int]:
        """How many requests were assigned that the reported load may not include; valid until the next assignment."""
        while self._assigned and next(iter(self._assigned.values()))[0] <= now - REPORT_SECONDS:
            self._withdraw(next(iter(self._assigned)))
        return self._counts

    def _withdraw(self, request: bytes) -> None:
        _, instances = self._assigned.pop(request, (0.0, ()))
        for instance in instances:
            self._counts[instance] -= 1
            if not self._counts[instance]:
                del self._counts[instance]


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
    load = next((engine for engine in member.figures.engines if engine.instance == instance), None)
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
