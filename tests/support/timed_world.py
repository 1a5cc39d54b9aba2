"""State of a manager in memory, with a clock that the test moves."""

from collections.abc import Sequence

from prfaas.index.membership import Engine, LinkFigures, Node
from prfaas.manager.planning.paths import Paths
from prfaas.manager.state.world import World
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole

MODEL = "m"


class TimedWorld:
    """World and paths of one manager; its nodes report when the test says so."""

    def __init__(self, *, expiry_seconds: float = 60.0) -> None:
        self.now = 0.0
        self.world = World(expiry_seconds=expiry_seconds, clock=self.clock)
        self.paths = Paths(self.world, clock=self.clock)

    def clock(self) -> float:
        return self.now

    def register(
        self,
        name: str,
        cluster: str,
        kind: ClusterKind = "pd",
        *,
        role: InstanceRole = "both",
        models: Sequence[str] = (MODEL,),
    ) -> None:
        """Register a node with one engine per model: name/0, name/1 …"""
        engines = tuple(
            Engine(InstanceId(f"{name}/{number}"), f"http://{name}", role, model) for number, model in enumerate(models)
        )
        node = Node(AgentName(name), ClusterName(cluster), kind, f"{name}:1", 1, (), engines)
        self.world.register(node)

    def report(self, name: str, *links: LinkFigures, loads: Sequence[pb.EngineLoad] = ()) -> None:
        messages = [pb.LinkFigures(**vars(link)) for link in links]
        self.world.record_report(AgentName(name), epoch=1, links=(messages, [*loads]))

    def beat(self, *names: str) -> None:
        for name in names:
            self.world.record_report(AgentName(name), epoch=1, links=None, is_heartbeat=True)
