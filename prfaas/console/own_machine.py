"""Addresses and keys of the components that are configured on this machine."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from prfaas import config
from prfaas.agent.config import AgentConfig
from prfaas.colocate.config import ColocateConfig
from prfaas.config import default
from prfaas.console.config import ConsoleConfig
from prfaas.errors import ConfigError
from prfaas.local import state_directory
from prfaas.manager.config import ManagerConfig
from prfaas.router.config import RouterConfig
from prfaas.router.sidecar.config import SidecarConfig
from prfaas.units import is_loopback, join_address, split_address

T = TypeVar("T")
COMPONENTS: Mapping[str, type[Any]] = {
    "agent": AgentConfig,
    "manager": ManagerConfig,
    "router": RouterConfig,
    "sidecar": SidecarConfig,
    "colocate": ColocateConfig,
}


def beside_components(settings: ConsoleConfig, directory: Path) -> ConsoleConfig:
    """Replace defaults by what the settings files of a directory say about its router, manager and agent."""
    manager = _read(ManagerConfig, "manager", directory)
    router = _read(RouterConfig, "router", directory)
    agent = _read(AgentConfig, "agent", directory)
    found: dict[str, Any] = {"secret_file": _secret_file(settings.secret_file, manager, router, agent)}
    if router is not None:
        found["routers"] = (_url(router.listen, is_encrypted=router.client_tls.certificate is not None),)
        found["router_key_file"] = router.operator_keys_file
    if manager is not None:
        found["pages"] = (_url(manager.http_listen, is_encrypted=_has_encrypted_pages(manager, manager.http_listen)),)
        found["managers"] = (_reachable(manager.listen),)
    elif router is not None or agent is not None:
        found["managers"] = (router.managers if router else ()) or (agent.managers if agent else ())
    if agent is not None:
        found["agents"] = (_url(agent.status_listen, is_encrypted=_has_encrypted_pages(agent, agent.status_listen)),)
    unset = {name for name in found if getattr(settings, name) == default(ConsoleConfig, name)}
    known = {name: value for name, value in found.items() if value or name == "managers"}
    return replace(settings, **{name: value for name, value in known.items() if name in unset})


def _secret_file(usual: Path, *components: Any) -> Path | None:
    """Return the secret of a component, or without components the user's own."""
    named = [Path(settings.secret_file) for settings in components if settings is not None]
    own = state_directory() / "secret"
    return named[0] if named else own if own.exists() and not usual.exists() else None


def _read(cls: type[T], component: str, directory: Path) -> T | None:
    """Return a component's settings, or None without a usable file."""
    with contextlib.suppress(ConfigError):
        file = directory / f"{component}.yaml"
        return config.load(cls, component=component, file=file, environment={}) if file.exists() else None
    return None


def _has_encrypted_pages(component: ManagerConfig | AgentConfig, address: str) -> bool:
    is_plain = component.insecure_plaintext or is_loopback(split_address(address)[0])
    return component.tls.certificate is not None and not is_plain


def _url(address: str, *, is_encrypted: bool) -> str:
    return f"{'https' if is_encrypted else 'http'}://{_reachable(address)}"


def _reachable(address: str) -> str:
    """Return an address that a client on this machine can dial."""
    host, port = split_address(address)
    return join_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
