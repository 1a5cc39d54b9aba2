"""Admission: operators' keys, tenants and key files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.config_checks import check_salt
from prfaas.errors import ConfigError
from prfaas.router.config import ClientTenantConfig
from prfaas.router.http.admission import DEFAULT_CLIENT, OperatorKeys, Tenants, read_clients, read_key
from tests.support.router import router_config
from tests.support.secret_files import write_secret

AUTHORIZATIONS = (None, "", "o", "Bearer ", "Bearer o", "bearer o", "Bearer p", "Bearer wrong")


@pytest.mark.parametrize(
    ("keys", "clients_are_known", "admitted"),
    [
        ((), False, set(AUTHORIZATIONS)),
        ((), True, set()),
        (("o",), False, {"Bearer o", "bearer o"}),
        (("o", "p"), True, {"Bearer o", "Bearer p", "bearer o"}),
    ],
)
def test_operator_pages_are_open_only_if_nobody_needs_a_key(
    keys: tuple[str, ...], clients_are_known: bool, admitted: set[str | None]
) -> None:
    operators = OperatorKeys(keys, clients_are_known=clients_are_known)
    assert {header for header in AUTHORIZATIONS if operators.may_see(header)} == admitted


def test_client_is_its_own_tenant_unless_it_shares_one() -> None:
    tenants = Tenants({"ann": "acme", "ben": "acme"}, default="west")
    assert [tenants.of(name) for name in ("ann", "ben", "eve", DEFAULT_CLIENT)] == ["acme", "acme", "eve", "west"]
    assert Tenants({}).of(DEFAULT_CLIENT) == "", "without keys nothing is salted"
    Tenants({"acme": "acme", "ann": "acme"}).check(["acme", "ann", DEFAULT_CLIENT])


@pytest.mark.parametrize(
    ("clients", "named"),
    [(["ann", "acme"], "acme is also a client"), (["west"], "west is also a client"), (["a@b"], "client a@b")],
)
def test_client_with_the_name_of_a_foreign_tenant_or_without_a_valid_salt_is_rejected(
    clients: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        Tenants({"ann": "acme"}, default="west").check(clients)


@pytest.mark.parametrize("name", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129])
def test_salts_that_engines_refuse_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="salt"):
        check_salt(name)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tenant": "a/b"}, "tenant: 'a/b'"),
        ({"tenants": [("acme", "ann"), ("acme", "ben")]}, "tenants"),
        ({"tenants": [("acme", "ann"), ("other", "ann")]}, "tenants"),
    ],
)
def test_contradictory_tenants_are_rejected(settings: dict[str, object], named: str) -> None:
    pairs = settings.get("tenants", ())
    assert isinstance(pairs, list | tuple)
    tenants = tuple(ClientTenantConfig(tenant=tenant, clients=(client,)) for tenant, client in pairs)
    with pytest.raises(ValueError, match=named):
        router_config(**{**settings, "tenants": tenants})


def test_key_file_without_keys_is_rejected_with_its_setting(tmp_path: Path) -> None:
    write_secret(tmp_path / "keys", "# nobody\n\n")
    for file in ("keys", "absent"):
        with pytest.raises(ConfigError, match=r"^api_keys_file: "):
            read_clients(tmp_path / file, setting="api_keys_file")


def test_key_belongs_to_the_client_named_after_it(tmp_path: Path) -> None:
    write_secret(tmp_path / "keys", "one\n  two acme\n# not me\nthree   acme\n")
    assert read_clients(tmp_path / "keys", setting="s") == {"one": "default", "two": "acme", "three": "acme"}
    write_secret(tmp_path / "keys", "one acme corp\n")
    with pytest.raises(ConfigError, match=r"^s: "):
        read_clients(tmp_path / "keys", setting="s")


def test_engine_key_file_has_exactly_one_key(tmp_path: Path) -> None:
    write_secret(tmp_path / "key", "one\ntwo\n")
    with pytest.raises(ConfigError, match=r"^s: .*2 keys"):
        read_key(tmp_path / "key", setting="s")
    assert read_key(None, setting="s") == ""


@pytest.mark.parametrize("read", [read_clients, read_key])
def test_a_key_file_that_everybody_may_read_is_refused_with_the_accepted_mode(
    read: Callable[..., object], tmp_path: Path
) -> None:
    file = write_secret(tmp_path / "keys", "one")
    for mode in (0o600, 0o640, 0o440):
        file.chmod(mode)
        assert read(file, setting="api_keys_file")
    for mode in (0o644, 0o604, 0o602):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=f"^api_keys_file: {file} has mode {mode:o}, .*mode 600 or 640"):
            read(file, setting="api_keys_file")
