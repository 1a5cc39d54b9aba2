"""All checks of a machine and the components configured on it."""

import contextlib
import errno
import functools
import os
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prfaas import config, grants
from prfaas.agent.config import AgentConfig
from prfaas.agent.engine.tls_ports import announced_url
from prfaas.colocate.config import ColocateConfig
from prfaas.config import default
from prfaas.console.config import ConsoleConfig
from prfaas.console.doctor import network
from prfaas.console.doctor.certificates import certificate_findings, clients_finding
from prfaas.console.doctor.finding import Finding, bad, good
from prfaas.console.doctor.machine import Machine, disk_finding, room_findings, tcp_findings
from prfaas.console.doctor.services import Nodes, manager_findings, record_finding, router_finding
from prfaas.console.own_machine import COMPONENTS
from prfaas.console.pages import first_json, tls_of
from prfaas.console.tables import nodes_of
from prfaas.errors import ConfigError, PageUnreachable
from prfaas.manager.config import ManagerConfig
from prfaas.router.config import RouterConfig
from prfaas.router.sidecar.config import SidecarConfig
from prfaas.transport.sender.link import LinkConfig


@dataclass(frozen=True)
class Patient:
    """Subject of the checks: settings files by component, the kernel's files, and the console's settings."""

    files: dict[str, Path]
    proc: Path
    console: ConsoleConfig
    check: Callable[[Any], None]
    """Raises ConfigError for settings or named files that stop the component's start."""

    def nodes(self) -> Nodes | None:
        """Return the live nodes from the first manager that answers, or None."""
        console = self.console
        with contextlib.suppress(PageUnreachable):
            state = first_json(console.pages, "/state", timeout_seconds=console.timeout, tls=_client_tls(console))
            return None if state is None else [node["node"] for node in nodes_of(state)]
        return None


def examine(patient: Patient) -> list[Finding]:
    """Return the findings of all checks that are possible here."""
    machine = Machine.read(patient.proc)
    loaded: dict[str, Any] = {}
    findings: list[Finding] = []
    for component, path in patient.files.items():
        load = functools.partial(config.load, COMPONENTS[component], component=component, file=path)
        try:
            loaded[component] = load()
            load(check=patient.check)
            findings.append(good("configuration", str(path), "accepted at the start"))
        except ConfigError as error:
            remedy = f"correct the file; prfaas config check {path}"
            findings.append(bad("configuration", str(path), str(error), remedy=remedy))
    agent: AgentConfig | None = loaded.get("agent")
    findings += tcp_findings(machine, congestion_control=LinkConfig().congestion_control)
    if agent:
        findings += room_findings(machine, agent, where="agent")
    for component, settings in loaded.items():
        findings += _CHECKS[component](settings, patient)
    findings += _certificates(patient.console, name=patient.console.name, where="console")
    seconds, tls = patient.console.timeout, _client_tls(patient.console)
    pages = patient.console.pages
    is_named = "manager" in loaded or pages != default(ConsoleConfig, "pages")
    findings += [network.clock_finding(page, is_named=is_named, timeout_seconds=seconds, tls=tls) for page in pages]
    return findings


def _client_tls(settings: Any) -> ssl.SSLContext | None:
    """Return a TLS context for pages from some settings, or None without usable certificates."""
    with contextlib.suppress(OSError):
        context = tls_of(settings.tls)
        if context is not None:
            context.check_hostname = False  # The page is on this machine, at any address.
        return context
    return None


def _runs(router: RouterConfig, *, seconds: float) -> bool:
    if router.client_tls.certificate is not None:
        return network.shows(router.listen, router.client_tls.certificate, timeout_seconds=seconds)
    return network.answers(router.listen, "/health", timeout_seconds=seconds)


def _agent_findings(agent: AgentConfig, patient: Patient) -> Iterator[Finding]:
    where, seconds = "agent", patient.console.timeout
    running = network.answers(agent.status_listen, "/healthz", timeout_seconds=seconds, tls=_client_tls(agent))
    for key in ("listen", "status_listen"):
        yield network.port_finding(getattr(agent, key), key=key, where=where, is_running=running)
    yield network.wire_finding(agent.listen, agent, where=where)
    yield network.pages_finding(agent.status_listen, agent, where=where)
    yield _socket_directory(agent.socket.parent)
    yield network.advertised_finding(agent, is_running=running, timeout_seconds=seconds)
    if agent.ssd_directory is not None:
        yield disk_finding(agent.ssd_directory, agent.ssd_bytes, where=where)
    yield from _certificates(agent, name=agent.name, where=where)
    yield from _secret_and_managers(agent, name=agent.name, where=where, patient=patient)
    tls = _client_tls(agent) if agent.engine_tls == "deployment" else None
    if agent.cluster_kind == "prfaas":
        wire = agent.advertise or agent.listen
        legs = {engine.instance: announced_url(engine, wire) for engine in agent.engines}
        yield from network.leg_findings(legs, agent, where=where)
    for engine in agent.engines:
        yield from network.engine_findings(engine, where=where, timeout_seconds=seconds, tls=tls)


def _socket_directory(directory: Path) -> Finding:
    remedy = f"install -d -o prfaas -g prfaas {directory}; RuntimeDirectory=prfaas in a unit does so"
    if not directory.is_dir():
        return bad(
            "socket_directory", "agent", f"{directory} does not exist: {os.strerror(errno.ENOENT)}", remedy=remedy
        )
    return good("socket_directory", "agent", f"{directory} exists")


def _manager_findings(manager: ManagerConfig, patient: Patient) -> Iterator[Finding]:
    where, seconds = "manager", patient.console.timeout
    running = network.answers(manager.http_listen, "/healthz", timeout_seconds=seconds, tls=_client_tls(manager))
    for key in ("listen", "http_listen"):
        yield network.port_finding(getattr(manager, key), key=key, where=where, is_running=running)
    yield network.calls_finding(manager.listen, manager, where=where)
    yield network.pages_finding(manager.http_listen, manager, where=where)
    yield record_finding(manager, timeout_seconds=seconds)
    yield from _certificates(manager, name=None, where=where)
    yield from _secret_and_managers(manager, name="", where=where, patient=patient)


def _router_findings(router: RouterConfig, patient: Patient) -> Iterator[Finding]:
    where = "router"
    running = _runs(router, seconds=patient.console.timeout)
    yield network.port_finding(router.listen, key="listen", where=where, is_running=running)
    yield network.router_address_finding(router, where=where)
    if router.ext_proc_listen:
        yield network.port_finding(router.ext_proc_listen, key="ext_proc_listen", where=where, is_running=running)
        yield network.calls_finding(router.ext_proc_listen, router, where=where)
    clients = router.client_tls
    if (files := clients.files()) is not None:
        yield from certificate_findings(replace(files, authority=None), name=None, where=f"{where}, clients")
    if clients.authority:
        yield clients_finding(clients.authority, clients.revocations, where=f"{where}, clients")
    yield from _key_files(router)
    yield from network.legs_findings(router, where=where)
    yield from network.wires_findings(router, timeout_seconds=patient.console.timeout)
    if router.managers and (nodes := patient.nodes()) is not None:
        yield router_finding(router, nodes)
    yield from _certificates(router, name="router", where=where)
    yield from _secret_and_managers(router, name="router", where=where, patient=patient)


def _key_files(router: RouterConfig) -> Iterator[Finding]:
    """Check that operator keys differ from client keys."""
    clients, operators = router.api_keys_file, router.operator_keys_file
    if clients is not None and operators is not None and clients.resolve() == operators.resolve():
        message = "api_keys_file and operator_keys_file are one file: every client can read operator pages"
        yield bad("keys", "router", message, remedy="write operator_keys_file: FILE with operator keys only")


def _sidecar_findings(sidecar: SidecarConfig, patient: Patient) -> Iterator[Finding]:
    where, seconds = "sidecar", patient.console.timeout
    running = network.answers(sidecar.status_listen, "/healthz", timeout_seconds=seconds, tls=_client_tls(sidecar))
    for key in ("listen", "status_listen"):
        yield network.port_finding(getattr(sidecar, key), key=key, where=where, is_running=running)
        yield network.pages_finding(getattr(sidecar, key), sidecar, where=where)
    yield from _certificates(sidecar, name=None, where=where)


def _colocate_findings(executor: ColocateConfig, patient: Patient) -> Iterator[Finding]:
    where, seconds = "colocate", patient.console.timeout
    running = network.answers(executor.listen, "/health", timeout_seconds=seconds, tls=_client_tls(executor))
    yield network.port_finding(executor.listen, key="listen", where=where, is_running=running)
    yield network.pages_finding(executor.listen, executor, where=where)
    if executor.agent_socket is not None:
        yield network.agent_finding(executor.agent_socket, where=where)
    yield from _certificates(executor, name=None, where=where)


def _certificates(settings: Any, *, name: str | None, where: str) -> Iterator[Finding]:
    files = settings.tls.files()
    if files is not None:
        yield from certificate_findings(files, name=name, where=where)


def _secret_and_managers(settings: Any, *, name: str, where: str, patient: Patient) -> Iterator[Finding]:
    path = Path(settings.secret_file)
    try:
        secret = grants.read_secret(path)
    except ConfigError as error:
        remedy = f"copy the deployment's secret there, readable by the service's user only: chmod 600 {path}"
        yield bad("secret", where, str(error), remedy=remedy)
        return
    yield good("secret", where, f"{path} is long enough and private")
    managers: tuple[str, ...] = getattr(settings, "managers", ())
    tls = settings.tls.files()
    if managers and (tls is None or all(path.is_file() for path in tls.paths)):
        seconds = patient.console.timeout
        yield from manager_findings(managers, name=name, secret=secret, tls=tls, where=where, timeout_seconds=seconds)


_CHECKS: dict[str, Callable[[Any, Patient], Iterator[Finding]]] = {
    "agent": _agent_findings,
    "manager": _manager_findings,
    "router": _router_findings,
    "sidecar": _sidecar_findings,
    "colocate": _colocate_findings,
}
