"""Settings of an agent that cannot work are refused by name."""

from pathlib import Path

import pytest

from prfaas.agent.config import AgentConfig, EngineConfig, TenantShareConfig
from prfaas.agent.engine.tls_ports import announced_url
from prfaas.config import load_mapping
from prfaas.errors import ConfigError

ENGINE = {"instance": "e1", "url": "http://n1:8000", "role": "both", "model": "m"}


@pytest.mark.parametrize("url", ["localhost:8000", "http://n1:port"])
def test_malformed_engine_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=f"url: '{url}'; write http://host:port"):
        load_mapping(EngineConfig, ENGINE | {"url": url}, where="test")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("name", "a b/c", "name: 'a b/c'; write letters, digits, '.', '_' and '-', such as west-0"),
        ("name", "a=b", "name: 'a=b'; write letters"),
        ("managers", ["10.0.0.1"], "managers: '10.0.0.1': not host:port; write host:port such as"),
        ("status_listen", "127.0.0.1:7400", "status_listen: 127.0.0.1:7400 is also used by listen; write another port"),
        ("socket", "/run/" + "a" * 103, "socket: .* has 108 bytes; write one that makes it at most 107"),
        ("status_listen", "0.0.0.0:7400", "status_listen: 0.0.0.0:7400 is also used by listen"),
        ("traces_endpoint", "nonsense", "traces_endpoint: 'nonsense'; write http://host:4318"),
        ("engines", [ENGINE, ENGINE], "engines: instance e1 is named twice"),
        ("pool_bytes", 0, "pool_bytes: .*at least 4KiB"),
        ("ssd_bytes", 0, "ssd_bytes: 0; write a size such as 64GiB, or no ssd_directory"),
    ],
)
def test_impossible_setting_is_refused_by_name(name: str, value: object, says: str) -> None:
    given = {"name": "n", "secret_file": "s", "cluster": "west", "insecure_plaintext": True, "ssd_directory": "d"}
    with pytest.raises(ConfigError, match=says):
        load_mapping(AgentConfig, given | {name: value}, where="test")


def test_zero_ssd_bytes_are_accepted_without_ssd() -> None:
    given = {"name": "n", "secret_file": "s", "ssd_bytes": 0}
    assert load_mapping(AgentConfig, given, where="test").ssd_directory is None


def test_two_addresses_may_both_use_port_zero() -> None:
    agent = {"name": "n", "secret_file": "s", "listen": "127.0.0.1:0", "status_listen": "127.0.0.1:0"}
    assert load_mapping(AgentConfig, agent, where="test").status_listen == "127.0.0.1:0"


@pytest.mark.parametrize("address", ["8.8.8.8:1", "[2001:4860:4860::8888]:1", "0.0.0.0:7400"])
def test_public_address_needs_certificates_or_insecure_plaintext(address: str) -> None:
    agent = {"name": "n", "secret_file": "s", "listen": address}
    with pytest.raises(ConfigError, match="not a private address; set tls"):
        load_mapping(AgentConfig, agent, where="test")
    assert load_mapping(AgentConfig, agent | {"insecure_plaintext": "true"}, where="test").listen == address


@pytest.mark.parametrize("address", ["10.0.1.1:7400", "[fd00::1]:7400", "west.example:7400", "127.0.0.1:7400"])
def test_private_address_needs_no_certificates(address: str) -> None:
    assert (
        load_mapping(AgentConfig, {"name": "n", "secret_file": "s", "listen": address}, where="test").listen == address
    )


def test_tenants_weigh_on_links_as_much_as_in_the_pool() -> None:
    named = TenantShareConfig(tenant="acme", ratio=0.6)
    config = AgentConfig(name="a", secret_file=Path("secret"), tenants=(named,), tenant_ratio=0.2)
    assert (config.tenant_weight("acme"), config.tenant_weight("other")) == (0.6, 0.2)


def test_engine_with_an_encrypted_port_listens_on_loopback_alone() -> None:
    with pytest.raises(ConfigError, match="url: http://n1:8000 is beyond loopback"):
        load_mapping(EngineConfig, ENGINE | {"tls_listen": "10.0.0.5:8443"}, where="test")


def test_encrypted_port_of_an_engine_needs_certificates() -> None:
    engine = EngineConfig(instance="e", url="http://127.0.0.1:8000", role="both", model="m", tls_listen="10.0.0.5:8443")
    with pytest.raises(ValueError, match=r"engines: tls_listen needs tls\.authority"):
        AgentConfig(name="n", secret_file=Path("secret"), engines=(engine,))


@pytest.mark.parametrize(
    ("tls_listen", "url"),
    [
        ("", "http://127.0.0.1:8000"),
        ("10.0.0.5:8443", "https://10.0.0.5:8443"),
        ("0.0.0.0:8443", "https://10.9.9.9:8443"),
        ("[::]:8443", "https://10.9.9.9:8443"),
    ],
)
def test_announced_url_is_the_encrypted_port_at_the_advertised_host(tls_listen: str, url: str) -> None:
    engine = EngineConfig(instance="e", url="http://127.0.0.1:8000", role="both", model="m", tls_listen=tls_listen)
    assert announced_url(engine, "10.9.9.9:7400") == url
