"""Fleet as the managers' states describe it."""

from typing import Any

import aiohttp
import pytest

from prfaas.router.config import RouterConfig
from prfaas.router.engines.fleet import Fleet
from prfaas.router.routing.manager_client import DecisionClient
from prfaas.rpc.generated import manager_pb2 as pb

CONFIG = RouterConfig(listen="127.0.0.1:0", secret_file="-", managers=("127.0.0.1:1",))


def _state(*names: str, **flags: Any) -> pb.StateSnapshot:
    nodes = [
        pb.NodeState(
            node=pb.Node(name=name, engines=[pb.Engine(instance=name, url=f"http://{name}:8000", role="both")])
        )
        for name in names
    ]
    return pb.StateSnapshot(nodes=nodes, **flags)


@pytest.mark.parametrize("flags", [{"settling": True}, {"index_stale": True}])
async def test_manager_without_full_knowledge_removes_no_instance(flags: dict[str, bool]) -> None:
    async with aiohttp.ClientSession() as session:
        fleet = Fleet(CONFIG, session)
        client = DecisionClient(CONFIG, bytes(32), fleet)
        client._apply(_state("a", "b"))
        client._apply(_state("c", **flags))
        assert sorted(instance.address.name for instance in fleet) == ["a", "b", "c"]
        client._apply(_state("c"))
        assert [instance.address.name for instance in fleet] == ["c"]
        await client.close()
