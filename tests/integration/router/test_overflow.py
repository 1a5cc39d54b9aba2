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
    operator, of_operators = operators_beside(keys)
    async with running(west, north), aiohttp.ClientSession() as session:
        config = router_config(
            clusters=(_cluster("west", west), _cluster("north", north)),
            cluster="west",
            overflow=True,
            api_keys_file=keys,
            tenants=(ClientTenantConfig(tenant="acme", clients=("bound",), clusters=("west",)),),
            **of_operators,
        )
        async with open_router(config, SECRET) as address:
            router = RunningRouter(f"http://{address}", (), (west, north), session, operator=operator)
            await router.until_health(west_0=True, north_0=True)

            async def used(client: str, prompt: str, path: str = "/v1/completions") -> tuple[int, int]:
                """Return the new requests of both engines, those for token ids included."""
                before = [len(engine.bodies) + engine.num_tokenised for engine in (west, north)]
                body = {"input": prompt} if "embeddings" in path else {"prompt": prompt}
                status, *_ = await router.post(body, path=path, Authorization=f"Bearer key-{client}")
                assert status == 200
                after = [len(engine.bodies) + engine.num_tokenised for engine in (west, north)]
                return after[0] - before[0], after[1] - before[1]

            assert await used("free", SHORT) == (1, 0)
            west.hangs = True
            held = [
                asyncio.create_task(router.post({"prompt": SHORT}, Authorization="Bearer key-bound")) for _ in range(5)
            ]
            try:
                await until(lambda: len(west.bodies) == 6, what="the requests that fill the west")
                west.hangs = False
                assert await used("free", SHORT) == (0, 1)
                assert await used("bound", LONG) == (2, 0)
                assert await used("bound", SHORT, "/v1/embeddings") == (1, 0)
            finally:
                await cancel_tasks(held)
            await until(lambda: west.num_broken_off == 5, what="room in the west")
            assert await used("free", SHORT) == (1, 0)
