"""Configurations of PPD's experiment as manager settings: roles, and the static x."""

import pytest

from prfaas.config import load_mapping
from prfaas.index.membership import Engine, Node
from prfaas.manager.config import ManagerConfig
from prfaas.manager.planning.paths import Paths
from prfaas.manager.routing.router import RequestRouter
from prfaas.manager.state.world import World
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.route import Decision, route
from prfaas.scheduler.snapshot import RequestFacts, Snapshot
from prfaas.types import AgentName, ClusterName, InstanceId, InstanceRole

MODEL, WEST = "m", ClusterName("west")
PROMPT_TOKENS, CACHED_TOKENS, SEEDS = 1000, 800, 1 << 32


def _snapshot(roles: dict[InstanceId, InstanceRole], ratio: float) -> Snapshot:
    """Return the snapshot of a manager with these settings."""
    settings = {"secret_file": "secret", "local_policy": "static", "local_turns_ratio": str(ratio)}
    world = World(expiry_seconds=60.0, clock=lambda: 0.0)
    for name, role in roles.items():
        engine = Engine(name, f"http://{name}", role, MODEL)
        world.register(Node(AgentName(name), WEST, "pd", f"{name}:7400", 1, (), (engine,)))
    routing = RequestRouter(
        load_mapping(ManagerConfig, settings, where="test"),
        world=world,
        paths=Paths(world, clock=lambda: 0.0),
        secret=bytes(32),
        clock=lambda: 0.0,
        wall_clock=lambda: 0.0,
    )
    request = pb.RouteRequest(request_id=b"first", model=MODEL, num_prompt_tokens=1)
    routing.route(request)
    decided = routing.decisions.get(b"first")
    assert decided is not None
    return decided.snapshot


def _decided(snapshot: Snapshot, decode: InstanceId, *, turn: int, seed: int = 1) -> Decision:
    """A turn of a conversation that this instance decodes."""
    others = frozenset(
        instance.instance for instance in snapshot.instances if instance.decodes and instance.instance != decode
    )
    cached = {AgentName(decode): CACHED_TOKENS} if turn > 1 else {}
    facts = RequestFacts(PROMPT_TOKENS, cached_tokens=cached, excluded=others, turn=turn, seed=seed)
    decision = route(snapshot, facts)
    assert decision.decode == decode
    return decision


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5, 0.75, 1.0])
def test_x_is_the_share_of_later_turns_that_stay(ratio: float) -> None:
    names = [InstanceId(f"D-{number}") for number in range(3)]
    snapshot = _snapshot({InstanceId("P-0"): "prefill", **dict.fromkeys(names, "decode")}, ratio)
    seeds = range(1, SEEDS, SEEDS // 100)
    stay = [_decided(snapshot, name, turn=2, seed=seed).route == "local" for name in names for seed in seeds]
    assert sum(stay) / len(stay) == pytest.approx(ratio, abs=0.01)
