"""Start without settings: a deployment on loopback, under a secret that its first command creates."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from prfaas import local
from prfaas.agent.config import AgentConfig
from prfaas.errors import ConfigError
from prfaas.manager.config import ManagerConfig
from prfaas.router.config import RouterConfig
from prfaas.units import is_loopback, split_address

MANAGER = "127.0.0.1:7410"
ENGINE = "http://127.0.0.1:8000"  # Where `vllm serve` listens by default.
_CONNECTOR = '{"kv_connector": "PrfaasConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'


class LocalStart:
    """Start of one component that names neither a settings file nor a secret."""

    def __init__(self, component: str) -> None:
        self._component = component
        self._is_used = False

    def settings(self) -> dict[str, str]:
        """Return the settings as texts, by name.

        Raises:
            ConfigError: the user's secret cannot be created.
        """
        self._is_used = True
        try:
            secret = str(local.secret_file())
        except OSError as error:
            raise ConfigError(f"secret_file: missing; {error.filename} cannot be created: {error.strerror}") from error
        return {"secret_file": secret, **_SETTINGS[self._component]()}

    def check(self, settings: Any) -> None:
        """Raise ConfigError if an address is beyond loopback. Other machines do not have the user's own secret."""
        for name in _ADDRESSES if self._is_used else ():
            value = getattr(settings, name, "")
            for address in (value,) if isinstance(value, str) else value:
                if address and not is_loopback(split_address(address)[0]):
                    raise ConfigError(f"secret_file: missing; {name} {address} is beyond loopback")

    def announce(self, settings: Any) -> None:
        """Print in three lines what runs where, and the next step."""
        if self._is_used:
            sys.stdout.write("\n".join(_LINES[self._component](settings)) + "\n")
            sys.stdout.flush()


def _agent_settings() -> dict[str, str]:
    engines = f"[{{instance: local, url: '{ENGINE}', role: both}}]"
    socket = str(local.agent_socket())
    return {"name": "local", "cluster": "local", "managers": MANAGER, "engines": engines, "socket": socket}


def _manager_lines(settings: ManagerConfig) -> tuple[str, ...]:
    return (
        f"manager: calls at {settings.listen}, dashboard at http://{settings.http_listen}/",
        f"secret:  {settings.secret_file}",
        "next:    prfaas-agent",
    )


def _agent_lines(settings: AgentConfig) -> tuple[str, ...]:
    urls = ", ".join(engine.url for engine in settings.engines)
    return (
        f"agent:   KV at {settings.listen}, engines attach at {settings.socket}",
        f"manager: {', '.join(settings.managers)}; the engine's API is expected at {urls} (or name it: --engines)",
        f"next:    vllm serve MODEL --enable-prefix-caching --kv-transfer-config '{_CONNECTOR}'",
    )


def _router_lines(settings: RouterConfig) -> tuple[str, ...]:
    return (
        f"router:  OpenAI API at http://{settings.listen}/v1",
        f"manager: {', '.join(settings.managers)}",
        f"next:    curl http://{settings.listen}/v1/models",
    )


_ADDRESSES = ("listen", "http_listen", "status_listen", "ext_proc_listen", "advertise", "managers")
_SETTINGS: Mapping[str, Callable[[], dict[str, str]]] = {
    "manager": dict,
    "agent": _agent_settings,
    "router": lambda: {"managers": MANAGER},
}
_LINES: Mapping[str, Callable[[Any], tuple[str, ...]]] = {
    "manager": _manager_lines,
    "agent": _agent_lines,
    "router": _router_lines,
}
LOCAL_COMPONENTS = frozenset(_SETTINGS)
