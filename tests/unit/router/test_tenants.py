"""Whose cache a client's requests use."""

from __future__ import annotations

import pytest

from prfaas.errors import ConfigError
from prfaas.router.config import RouterConfig, TenantConfig
from prfaas.router.http.admission import DEFAULT_CLIENT, Tenants, check_salt
from tests.integration.router.door import router_config


def test_a_client_is_its_own_tenant_unless_it_shares_one() -> None:
    tenants = Tenants({"ann": "acme", "ben": "acme"}, default="west")
    assert [tenants.of(name) for name in ("ann", "ben", "eve", DEFAULT_CLIENT)] == ["acme", "acme", "eve", "west"]
    assert Tenants({}).of(DEFAULT_CLIENT) == "", "without keys nothing is salted"


@pytest.mark.parametrize(
    ("clients", "named"),
    [(["ann", "acme"], "acme is also a client"), (["west"], "west is also a client"), (["a@b"], "client a@b")],
)
def test_a_client_that_would_share_by_its_name_or_cannot_be_a_salt_stops_the_start(
    clients: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        Tenants({"ann": "acme"}, default="west").check(clients)


def test_a_tenant_named_like_one_of_its_clients_is_meant() -> None:
    Tenants({"acme": "acme", "ann": "acme"}).check(["acme", "ann", DEFAULT_CLIENT])


@pytest.mark.parametrize("name", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129])
def test_what_engines_refuse_is_no_salt(name: str) -> None:
    with pytest.raises(ValueError, match="no salt"):
        check_salt(name)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tenant": "a/b"}, "tenant: 'a/b'"),
        ({"tenants": [("acme", "ann"), ("acme", "ben")]}, "named twice"),
        ({"tenants": [("acme", "ann"), ("other", "ann")]}, "a client is of two"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, object], named: str) -> None:
    pairs = settings.get("tenants", ())
    assert isinstance(pairs, list | tuple)
    tenants = tuple(TenantConfig(tenant=tenant, clients=(client,)) for tenant, client in pairs)
    with pytest.raises(ValueError, match=named):
        router_config(**{**settings, "tenants": tenants})


def test_the_settings_say_who_shares() -> None:
    config: RouterConfig = router_config(tenants=(TenantConfig(tenant="acme", clients=("ann", "ben")),), tenant="west")
    assert config.client_tenants() == Tenants({"ann": "acme", "ben": "acme"}, "west")
