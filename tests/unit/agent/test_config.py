"""An agent's settings that cannot work stop its start by name."""

from __future__ import annotations

import pytest

from prfaas.agent.config import EngineConfig
from prfaas.config import load_mapping
from prfaas.errors import ConfigError

ENGINE = {"instance": "e1", "url": "http://n1:8000", "role": "both", "model": "m", "kv_events": "tcp://n1:5557"}


@pytest.mark.parametrize("name", ["kv_events", "kv_events_replay"])
def test_an_endpoint_to_which_nothing_connects_stops_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: 'localhost:5557'; write tcp://host:port"):
        load_mapping(EngineConfig, ENGINE | {name: "localhost:5557"}, where="test")
