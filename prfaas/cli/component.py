"""Start of a component: reads settings, checks the files that they name, reports what stops the start."""

import contextlib
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prfaas import config, grants, logs
from prfaas.agent.config import AgentConfig
from prfaas.cli import startup
from prfaas.cli.local import LOCAL_COMPONENTS, LocalStart
from prfaas.colocate.config import ColocateConfig
from prfaas.console.config import ConsoleConfig
from prfaas.console.pages import tls_of
from prfaas.errors import ConfigError, MissingExtraError
from prfaas.manager.config import ManagerConfig
from prfaas.router.config import RouterConfig
from prfaas.router.http.admission import Tenants, read_clients, read_key
from prfaas.router.sidecar.config import SidecarConfig
from prfaas.router.sidecar.prefill_host import AllowList
from prfaas.transport.net.tls import Certificates, TlsConfig

T = TypeVar("T")


def run(
    component: str, cls: type[T], argv: Sequence[str] | None, *, doc: str | None, start: Callable[[T], None]
) -> int:
    """Parse settings and call `start`, which serves until SIGTERM or SIGINT. Return 2 if it cannot start."""
    arguments = sys.argv[1:] if argv is None else argv
    local = LocalStart(component)

    def check(settings: T) -> None:
        check_named_files(settings)
        local.check(settings)

    settings = config.parse(
        cls,
        component=component,
        argv=arguments,
        doc=doc or "",
        check=check,
        local=local.settings if component in LOCAL_COMPONENTS else None,
    )
    logs.setup(component)
    local.announce(settings)
    try:
        start(settings)
    except (ConfigError, MissingExtraError) as error:
        sys.stderr.write(f"prfaas-{component}: {error}\n")
        return 2
    return 0


def check_named_files(settings: Any) -> None:
    """Raise ConfigError with the setting's name for anything that the start could not use."""
    with contextlib.suppress(MissingExtraError):  # The start reports the missing extra.
        _CHECKS[type(settings)](settings)


def _check_certificates(
    tls: TlsConfig, *, load: Callable[[TlsConfig], object] = Certificates.of, setting: str = "tls"
) -> None:
    """Load the certificates of a setting. On failure, name the file at fault."""
    try:
        load(tls)
    except (ConfigError, OSError) as error:  # SSLError is a subclass of OSError.
        for name, read in _READ.items():
            _check_file(f"{setting}.{name}", getattr(tls, name), read)
        raise ConfigError(f"{setting}.certificate: {error}") from error


def _check_file(setting: str, path: Path | None, read: Callable[[Path], object]) -> None:
    try:
        if path is not None:
            read(path)
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be used: {error.strerror}") from error


def _trust(path: Path) -> None:
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)


# Reader of each file alone. A mismatch of key and certificate shows only when both are loaded.
_READ: Mapping[str, Callable[[Path], object]] = {
    "authority": _trust,
    "certificate": Path.read_bytes,
    "key": Path.read_bytes,
    "revocations": _trust,
}


def _check_agent(settings: AgentConfig) -> None:
    grants.read_secret(settings.secret_file)
    _check_certificates(settings.tls)  # Managers always ask for them.


def _check_manager(settings: ManagerConfig) -> None:
    grants.read_secret(settings.secret_file)
    _check_certificates(settings.tls)
    policy = startup.load_extra("prfaas.manager.routing.policy", extra="site")
    policy.read_endpoint_picker(settings.endpoint_picker)
    policy.read_ppd_table(settings.ppd_table)
    if settings.redis_url:
        startup.load_extra("prfaas.index.store.redis_store", extra="site").RedisStore(settings.redis_url)
    if settings.deployment is not None:
        _check_deployment(settings.deployment)


def _check_deployment(file: Path) -> None:
    try:
        files = startup.load_extra("prfaas.solve.files.deployment_file", extra="site")
        traces = startup.load_extra("prfaas.solve.files.traces", extra="site")
        _, written = files.read_deployment(file)
        traces.find_trace(written.trace, beside=file.parent)
    except (ConfigError, MissingExtraError) as error:
        raise ConfigError(f"deployment: {error}") from error


def _check_router(settings: RouterConfig) -> None:
    grants.read_secret(Path(settings.secret_file))
    _check_certificates(settings.tls)
    _check_certificates(settings.client_tls, setting="client_tls")
    Tenants.of_config(settings).check(read_clients(settings.api_keys_file, setting="api_keys_file").values())
    read_clients(settings.operator_keys_file, setting="operator_keys_file")
    read_key(settings.engine_api_key_file, setting="engine_api_key_file")


def _check_sidecar(settings: SidecarConfig) -> None:
    AllowList(settings.prefill_hosts)
    _check_certificates(settings.tls)


def _check_colocate(settings: ColocateConfig) -> None:
    _check_certificates(settings.tls)
    if settings.profile is not None:
        try:
            startup.load_extra("prfaas.solve.files.profile_file", extra="site").read_colocation(settings.profile)
        except ConfigError as error:
            raise ConfigError(f"profile: {error}") from error


def _check_console(settings: ConsoleConfig) -> None:
    read_key(settings.router_key_file, setting="router_key_file")
    _check_certificates(settings.tls, load=tls_of)


_CHECKS: Mapping[type[Any], Callable[[Any], None]] = {
    AgentConfig: _check_agent,
    ManagerConfig: _check_manager,
    RouterConfig: _check_router,
    SidecarConfig: _check_sidecar,
    ColocateConfig: _check_colocate,
    ConsoleConfig: _check_console,
}
