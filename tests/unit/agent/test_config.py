"""An agent's settings that cannot work stop its start by name."""

from __future__ import annotations

import pytest

from prfaas.agent.config import AgentConfig, EngineConfig
from prfaas.config import load_mapping
from prfaas.errors import ConfigError

ENGINE = {"instance": "e1", "url": "http://n1:8000", "role": "both", "model": "m", "kv_events": "tcp://n1:5557"}


@pytest.mark.parametrize("name", ["kv_events", "kv_events_replay"])
def test_an_endpoint_to_which_nothing_connects_stops_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: 'localhost:5557'; write tcp://host:port"):
        load_mapping(EngineConfig, ENGINE | {name: "localhost:5557"}, where="test")


@pytest.mark.parametrize("address", ["8.8.8.8:1", "[2001:4860:4860::8888]:1", "0.0.0.0:7400"])
def test_a_wire_beyond_private_networks_asks_for_certificates_or_an_open_word(address: str) -> None:
    agent = {"name": "n", "secret_file": "s", "listen": address}
    with pytest.raises(ConfigError, match="not a private address; set tls_"):
        load_mapping(AgentConfig, agent, where="test")
    assert load_mapping(AgentConfig, agent | {"insecure_plaintext": "true"}, where="test").listen == address


@pytest.mark.parametrize("address", ["10.0.1.1:7400", "[fd00::1]:7400", "west.example:7400", "127.0.0.1:7400"])
def test_a_wire_on_a_private_network_asks_for_nothing(address: str) -> None:
    assert (
        load_mapping(AgentConfig, {"name": "n", "secret_file": "s", "listen": address}, where="test").listen == address
    )
