"""The files that a component's settings name, read as its start reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prfaas import grants
from prfaas.agent.config import AgentConfig
from prfaas.cli import extras
from prfaas.colocate.config import ColocateConfig
from prfaas.console.config import ConsoleConfig
from prfaas.console.pages import tls_of
from prfaas.errors import ConfigError, MissingExtraError
from prfaas.manager.config import ManagerConfig
from prfaas.manager.within_policy import read_policy
from prfaas.router.admission import read_clients, read_key
from prfaas.router.config import RouterConfig
from prfaas.router.sidecar.config import SidecarConfig


def check(settings: Any) -> None:
    """Raise ConfigError, with the setting's name, when one of the files cannot be used."""
    _CHECKS[type(settings)](settings)


def _check_certificates(setting: str, load: Callable[[], object]) -> None:
    try:
        load()
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error


def _check_agent(settings: AgentConfig) -> None:
    grants.read_secret(settings.secret_file)
    _check_certificates("tls_certificate", lambda: settings.certificates(speaks=()))


def _check_manager(settings: ManagerConfig) -> None:
    grants.read_secret(settings.secret_file)
    _check_certificates("tls_certificate", lambda: settings.certificates(speaks=()))
    read_policy(settings)
    if settings.deployment is not None:
        _check_deployment(settings.deployment)


def _check_deployment(file: Path) -> None:
    try:
        files = extras.load("prfaas.solve.deployment_file", extra="solve")
        traces = extras.load("prfaas.solve.command", extra="solve")
        _, written = files.read_deployment(file)
        traces.find_trace(written.trace, beside=file.parent)
    except (ConfigError, MissingExtraError) as error:
        raise ConfigError(f"deployment: {error}") from error


def _check_router(settings: RouterConfig) -> None:
    grants.read_secret(Path(settings.secret_file))
    _check_certificates("tls_certificate", lambda: settings.certificates(speaks=()))
    _check_certificates("client_tls_certificate", settings.client_certificates)
    settings.client_tenants().check(read_clients(settings.api_keys_file, setting="api_keys_file").values())
    read_clients(settings.operator_keys_file, setting="operator_keys_file")
    read_key(settings.engine_api_key_file, setting="engine_api_key_file")


def _check_sidecar(settings: SidecarConfig) -> None:
    _check_certificates("tls_certificate", lambda: settings.certificates(speaks=()))


def _check_colocate(settings: ColocateConfig) -> None:
    _check_certificates("tls_certificate", settings.certificates)


def _check_console(settings: ConsoleConfig) -> None:
    read_key(settings.router_key_file, setting="router_key_file")
    try:
        tls_of(settings.tls_authority, settings.tls_certificate, settings.tls_key)
    except OSError as error:  # an SSLError is one
        raise ConfigError(f"tls_certificate: {settings.tls_certificate} cannot be used ({error})") from error


_CHECKS: Mapping[type[Any], Callable[[Any], None]] = {
    AgentConfig: _check_agent,
    ManagerConfig: _check_manager,
    RouterConfig: _check_router,
    SidecarConfig: _check_sidecar,
    ColocateConfig: _check_colocate,
    ConsoleConfig: _check_console,
}
