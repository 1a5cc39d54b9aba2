"""Requests leave a full PD cluster for another, and return."""

import asyncio
from pathlib import Path

import aiohttp

from prfaas.router.config import ClientTenantConfig, ClusterConfig, InstanceConfig
from prfaas.router.server import open_router
from prfaas.rpc.tasks import cancel_tasks
from tests.support.paced_engine import PacedEngine, running
from tests.support.router import LONG, SECRET, SHORT, RunningRouter, operators_beside, router_config
from tests.support.secret_files import write_secret
from tests.support.waiting import until


def _cluster(name: str, engine: PacedEngine) -> ClusterConfig:
    instance = InstanceConfig(name=f"{name}/0", url=engine.url, role="both", agent=name, wire="127.0.0.1:7400")
    return ClusterConfig(name=name, kind="pd", instances=(instance,))


async def test_requests_overflow_while_their_cluster_is_full_and_those_of_a_bound_tenant_stay(tmp_path: Path) -> None:
    west, north = PacedEngine(), PacedEngine()
    keys = write_secret(tmp_path / "clients", "key-bound bound\nkey-free free\n")
    operator, settings = operators_beside(keys)
    settings["tenants"] = (ClientTenantConfig(tenant="acme", clients=("bound",), clusters=("west",)),)
    async with running(west, north), aiohttp.ClientSession() as session:
        clusters = (_cluster("west", west), _cluster("north", north))
        config = router_config(clusters=clusters, cluster="west", overflow=True, api_keys_file=keys, **settings)
        async with open_router(config, SECRET) as address:
            router = RunningRouter(f"http://{address}", (), (west, north), session, operator=operator)
            await router.until_health(west_0=True, north_0=True)

            async def leaves(client: str, path: str = "/v1/completions", **body: str) -> bool:
                """Return whether the north gets the request, or the question for its token ids, and else the west."""
                before = [len(engine.bodies) for engine in (west, north)], north.num_tokenised
                assert (await router.post(body, path=path, Authorization=f"Bearer key-{client}"))[0] == 200
                return ([len(west.bodies) - 1, len(north.bodies)], north.num_tokenised) != before

            assert not await leaves("free", prompt=SHORT)
            west.hangs, bound = True, {"Authorization": "Bearer key-bound"}
            held = [asyncio.create_task(router.post({"prompt": SHORT}, **bound)) for _ in range(5)]
            try:
                await until(lambda: len(west.bodies) == 6, what="the requests that fill the west")
                west.hangs = False
                assert await leaves("free", prompt=SHORT)
                assert not await leaves("bound", prompt=LONG)
                assert not await leaves("bound", "/v1/embeddings", input=SHORT)
            finally:
                await cancel_tasks(held)
            await until(lambda: west.num_broken_off == 5, what="room in the west")
            assert not await leaves("free", prompt=SHORT)
