"""Every key of `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.errors import ConfigError


@dataclass(frozen=True)
class ConnectorConfig:
    """What vLLM's `--kv-transfer-config` may say to this connector."""

    agent_socket: str
    model: str  # identity of the weights; equal on both sides of a transfer
    tenant: str = ""
    send_wait_seconds: float = 2.0  # how long a prefill leg waits, unscheduled, for its slots
    idle_wait_seconds: float = 0.002  # how long one poll may wait when the engine has nothing else to do


_KINDS: dict[str, tuple[type, ...]] = {
    "agent_socket": (str,),
    "model": (str,),
    "tenant": (str,),
    "send_wait_seconds": (int, float),
    "idle_wait_seconds": (int, float),
}


def parse_extra_config(extra: Mapping[str, Any], *, served_model: str) -> ConnectorConfig:
    """The connector's settings; `model` defaults to the served name.

    Raises:
        ConfigError: a key is unknown, missing or of another type; the message names it.
    """
    for key, value in extra.items():
        if key not in _KINDS:
            raise ConfigError(f"kv_connector_extra_config: unknown key {key!r}; known are {', '.join(_KINDS)}")
        if not isinstance(value, _KINDS[key]) or isinstance(value, bool) or (isinstance(value, int | float) and value < 0):
            wanted = "a text" if str in _KINDS[key] else "a number of seconds"
            raise ConfigError(f"kv_connector_extra_config: {key}: {value!r} is not {wanted}")
    if not extra.get("agent_socket"):
        raise ConfigError("kv_connector_extra_config: agent_socket is missing: the path that prfaas-agent listens at")
    return ConnectorConfig(**{"model": served_model, **extra})
