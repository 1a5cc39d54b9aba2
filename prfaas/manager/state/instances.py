"""Instances that serve each model, with the load that decisions assume."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.index.membership import Engine, EngineLoad, Member
from prfaas.manager.state.world import World
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.snapshot import InstanceState
from prfaas.types import InstanceId

REPORT_SECONDS = 2.0  # Agents report loads each second, so two seconds cover an assignment.


class AssignedLoad:
    """Requests assigned within `REPORT_SECONDS`, so that a burst spreads before loads are reported again.

    Times are monotonic seconds.
    """

    def __init__(self) -> None:
        # Oldest first.
        self._assigned: OrderedDict[bytes, tuple[float, tuple[InstanceId, ...]]] = OrderedDict()
        self._counts: Counter[InstanceId] = Counter()

    def assign(self, request: bytes, instances: Iterable[InstanceId], *, now: float) -> None:
        """Assign a request to instances, replacing an earlier assignment of the same request."""
        self._withdraw(request)
        self._assigned[request] = (now, tuple(instances))
        self._counts.update(self._assigned[request][1])

    def counts(self, *, now: float) -> Mapping[InstanceId, int]:
        """Return assigned requests that the reported load may not include. Valid until the next assignment."""
        while self._assigned and next(iter(self._assigned.values()))[0] <= now - REPORT_SECONDS:
            self._withdraw(next(iter(self._assigned)))
        return self._counts

    def _withdraw(self, request: bytes) -> None:
        _, instances = self._assigned.pop(request, (0.0, ()))
        for instance in instances:
            self._counts[instance] -= 1
            if not self._counts[instance]:
                del self._counts[instance]


MAX_COLD_USES = 4096  # Bounds the table when instance names change at each start.
_NOTHING = pb.InFlight()


@dataclass(frozen=True, eq=False)
class InstancePlace:
    """An instance with its node and its last reported load."""

    engine: Engine
    member: Member
    load: EngineLoad


class _RequestDependentState(NamedTuple):
    """Part of an instance's state that differs from request to request."""

    num_assigned: int
    num_in_flight: int
    num_in_flight_tokens: int
    last_cold_use: float | None


Places = Mapping[InstanceId, InstancePlace]


class Instances:
    """Live instances by model, with their state for the scheduler. `clock` is monotonic."""

    def __init__(self, world: World, *, clock: Callable[[], float]) -> None:
        self._world = world
        self._clock = clock
        self._cold_uses: dict[InstanceId, float] = {}
        self._assigned = AssignedLoad()
        self._known: dict[str, Places] = {}  # Keyed by model.
        self._known_of: tuple[Sequence[Member], int, frozenset[InstanceId]] = ((), -1, frozenset())
        self._states: dict[InstancePlace, tuple[_RequestDependentState, InstanceState]] = {}

    def serving(self, model: str) -> Places:
        """Return the live instances that serve a model. Resting ones decode only if no other could."""
        live, version, changing_role = self._world.live(), self._world.version, self._world.changing_role
        if live is not self._known_of[0] or (version, changing_role) != self._known_of[1:]:
            self._known_of = (live, version, changing_role)
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
            engine.instance: InstancePlace(engine, member, _load(engine.instance, member))
            for member in live
            for engine in member.node.engines
            if engine.model == model
        }
        resting = self._world.resting
        staying = {name: place for name, place in places.items() if name not in resting}
        if any(_decodes(place) for place in staying.values()):
            return staying
        return {name: place for name, place in places.items() if name in staying or _decodes(place)}

    def states(
        self, places: Places, *, cluster: str = "", in_flight: Iterable[pb.InFlight] = ()
    ) -> tuple[InstanceState, ...]:
        """Return the scheduler's view of instances. `in_flight` is what the asking router has sent.

        If `cluster` is given, only that cluster's instances may decode.
        """
        in_flight_by_instance = {in_flight_load.instance: in_flight_load for in_flight_load in in_flight}
        assigned, cold_uses = self._assigned.counts(now=self._clock()), self._cold_uses
        return tuple(
            [
                self._state(
                    place,
                    _RequestDependentState(
                        assigned.get(name, 0),
                        (in_flight_load := in_flight_by_instance.get(name, _NOTHING)).num_requests,
                        in_flight_load.num_tokens,
                        cold_uses.get(name),
                    ),
                )
                for name, place in places.items()
                if not cluster or place.member.node.cluster == cluster or place.member.node.cluster_kind == "prfaas"
            ]
        )

    def _state(self, place: InstancePlace, variable: _RequestDependentState) -> InstanceState:
        known = self._states.get(place)
        if known is not None and known[0] == variable:
            return known[1]
        state = _instance_state(place, variable)
        self._states[place] = (variable, state)
        return state

    def assign(self, request: bytes, instances: Iterable[InstanceId], *, now: float) -> None:
        """Count a request at these instances until their reports include it."""
        self._assigned.assign(request, instances, now=now)

    def note_cold_use(self, instance: InstanceId, now: float) -> None:
        """Record that an instance decodes a request of which nothing is cached anywhere."""
        self._cold_uses.pop(instance, None)  # Keeps the least recently used instance first.
        self._cold_uses[instance] = now
        if len(self._cold_uses) > MAX_COLD_USES:
            del self._cold_uses[next(iter(self._cold_uses))]


def _load(instance: InstanceId, member: Member) -> EngineLoad:
    load = next((engine for engine in member.figures.engines if engine.instance == instance), None)
    return load or EngineLoad(instance, 0, 0, 0.0)


def _decodes(place: InstancePlace) -> bool:
    return place.member.node.cluster_kind == "pd" and place.engine.role != "prefill"


def decoded_models(member: Member) -> frozenset[str]:
    """Return the models that a node decodes."""
    if member.node.cluster_kind != "pd":
        return frozenset()
    return frozenset(engine.model for engine in member.node.engines if engine.role != "prefill")


def _instance_state(place: InstancePlace, variable: _RequestDependentState) -> InstanceState:
    engine, node, load = place.engine, place.member.node, place.load
    return InstanceState(
        instance=engine.instance,
        cluster=node.cluster,
        cluster_kind=node.cluster_kind,
        role=engine.role,
        agent=node.name,
        num_requests=load.num_running + load.num_waiting + variable.num_assigned,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        kv_usage_ratio=load.kv_usage_ratio,
        num_in_flight=variable.num_in_flight,
        num_in_flight_tokens=variable.num_in_flight_tokens,
        last_cold_use=variable.last_cold_use,
    )
