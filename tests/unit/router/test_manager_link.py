"""What the router makes of the states that managers send."""

from __future__ import annotations

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
async def test_a_manager_that_may_not_have_heard_of_all_takes_no_instance_away(flags: dict[str, bool]) -> None:
    async with aiohttp.ClientSession() as session:
        fleet = Fleet(CONFIG, session)
        link = DecisionClient(CONFIG, bytes(32), fleet)
        link._take(_state("a", "b"))
        link._take(_state("c", **flags))
        assert sorted(its.address.name for its in fleet) == ["a", "b", "c"]
        link._take(_state("c"))
        assert [its.address.name for its in fleet] == ["c"]
        await link.close()
