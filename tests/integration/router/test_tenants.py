"""Tenants: each client finds only the cache of its own tenant."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prfaas import grants
from prfaas.hashing import HashChain, root_hash
from prfaas.router.config import ClientTenantConfig
from tests.integration.router.managed import PROMPT, Managed, make_managed
from tests.support.paced_engine import MODEL
from tests.support.router import LONG, SHORT, running_router
from tests.support.secret_files import write_secret

KEYS = "key-alice alice\nkey-bob bob\nkey-ann ann\nkey-none\n"
TENANTS = (ClientTenantConfig(tenant="acme", clients=("bob", "ann")),)


def _keys(directory: Path) -> dict[str, Any]:
    write_secret(directory / "clients", KEYS)
    return {"api_keys_file": directory / "clients", "tenants": TENANTS}


@contextlib.asynccontextmanager
async def _managed(directory: Path) -> AsyncIterator[Managed]:
    async with make_managed(directory, **_keys(directory)) as managed:
        await managed.router.until_health(**{"east_0": True, "west-0_0": True})
        yield managed


async def _num_cached(managed: Managed, client: str) -> int:
    """Return the tokens of the prompt that one client finds cached."""
    found: int = (await managed.router.decided(PROMPT, Authorization=f"Bearer key-{client}"))["num_cached_tokens"]
    return found


async def test_client_finds_only_its_own_cached_prompt(tmp_path: Path) -> None:
    async with _managed(tmp_path) as managed:
        first = await managed.router.decided(PROMPT, Authorization="Bearer key-alice")
        assert (first["decided_by"], first["num_cached_tokens"]) == ("manager", 0)
        salt = managed.router.west.bodies[-1]["cache_salt"]
        await managed.hold(PROMPT[:160], tenant=salt)
        found = {name: await _num_cached(managed, name) for name in ("alice", "bob", "none")}
    assert found == {"alice": 160, "bob": 0, "none": 0}


async def test_clients_of_one_tenant_share_a_cache(tmp_path: Path) -> None:
    async with _managed(tmp_path) as managed:
        await managed.router.decided(PROMPT, Authorization="Bearer key-bob")
        await managed.hold(PROMPT[:160], tenant=managed.router.west.bodies[-1]["cache_salt"])
        found = {name: await _num_cached(managed, name) for name in ("ann", "bob", "alice")}
    assert found == {"ann": 160, "bob": 160, "alice": 0}


async def test_same_session_name_is_a_separate_session_of_each_tenant(tmp_path: Path) -> None:
    async with _managed(tmp_path) as managed:
        for client in ("alice", "bob", "ann"):
            await managed.router.decided(PROMPT, **{"Authorization": f"Bearer key-{client}", "x-session-id": "chat"})
        sessions = {(tenant, name) for tenant, name, _, _ in managed.manager.routing.sessions.latest(now=0.0)}
    assert sessions == {("alice", "chat"), ("acme", "chat")}


async def test_both_legs_and_the_grant_carry_the_tenant(tmp_path: Path) -> None:
    async with running_router(**_keys(tmp_path)) as router:
        await router.post({"prompt": LONG}, Authorization="Bearer key-ann")
        (prefill,), (decode,) = router.east.bodies, router.west.bodies
    assert prefill["cache_salt"] == decode["cache_salt"] == "acme"
    grant = grants.unverified(grants.from_text(decode["kv_transfer_params"]["prfaas_grant"]))
    chain = HashChain(root_hash(MODEL, b"acme"), list(LONG.encode())[:-1])
    assert (grant.tenant, grant.prompt_hash) == ("acme", chain.at(chain.num_tokens))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": SHORT}),
        ("/v1/completions", {"prompt": SHORT, "cache_salt": None}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_every_request_has_the_salt_of_its_client(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with running_router(**_keys(tmp_path)) as router:
        for name in ("alice", "ann", "none"):
            assert (await router.post(body, path=path, Authorization=f"Bearer key-{name}"))[0] == 200
        assert [body.get("cache_salt") for body in router.west.bodies] == ["alice", "acme", None]


async def test_without_keys_all_requests_belong_to_the_routers_tenant() -> None:
    async with running_router() as router:
        await router.post({"prompt": SHORT})
        assert "cache_salt" not in router.west.bodies[-1]
    async with running_router(tenant="west") as router:
        await router.post({"prompt": SHORT})
        assert router.west.bodies[-1]["cache_salt"] == "west"
