"""Checks by trial: free ports, reachable addresses, encryption, clocks, engines."""

import contextlib
import email.utils
import errno
import functools
import http.client
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prfaas.agent.config import AgentConfig, EngineConfig
from prfaas.console.doctor.finding import Finding, bad, good, warning
from prfaas.console.pages import read_json
from prfaas.errors import PageUnreachable
from prfaas.router.config import RouterConfig
from prfaas.transport.net.sockets import public_address
from prfaas.units import is_loopback, join_address, split_address

_ADVERTISED = "advertised_address"
MAX_PARALLEL_CHECKS = 32
MAX_CLOCK_SECONDS = 5.0  # Grants live for minutes. Certificates and logs are compared by the second.


def port_finding(address: str, *, key: str, where: str, is_running: bool) -> Finding:
    """Check that a component can listen at an address."""
    if is_running:
        return good("port", where, f"{key} {address}: in use by this component, which is running")
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return _not_bound(address, error, key=key, where=where)
    return good("port", where, f"{key} {address}: free")


def _not_bound(address: str, error: OSError, *, key: str, where: str) -> Finding:
    port = split_address(address)[1]
    if error.errno == errno.EADDRINUSE:
        remedy = f"ss -ltnp 'sport = :{port}' shows the process; stop it, or write another port"
        return bad("port", where, f"{key} {address}: another process listens there", remedy=remedy)
    if error.errno == errno.EACCES:
        return bad("port", where, f"{key} {address}: only root may listen there", remedy="write a port above 1023")
    message = f"{key} {address}: not an address of this machine ({error.strerror})"
    return bad("address", where, message, remedy="ip -brief address shows them; write one of those")


def pages_finding(address: str, settings: Any, *, where: str) -> Finding:
    """Check the encryption of status pages. They are plain on loopback and with `insecure_plaintext` (`tls_proxy_for`)."""
    is_plain = settings.tls.certificate is None or settings.insecure_plaintext or is_loopback(split_address(address)[0])
    return _plaintext(address, is_encrypted=not is_plain, where=where)


def calls_finding(address: str, settings: Any, *, where: str) -> Finding:
    """Check the encryption of gRPC, which needs certificates."""
    return _plaintext(address, is_encrypted=settings.tls.certificate is not None, where=where)


def wire_finding(address: str, agent: AgentConfig, *, where: str) -> Finding:
    """Check the encryption of KV transfers. Private networks may use plain text."""
    host, _ = split_address(address)
    is_encrypted = agent.tls.certificate is not None and not agent.insecure_plaintext
    if is_encrypted or agent.insecure_plaintext or is_loopback(host):
        return _plaintext(address, is_encrypted=is_encrypted, where=where)
    with contextlib.suppress(OSError):
        if public_address(host):
            remedy = "set tls with authority, certificate and key"
            return bad("plaintext", where, f"{address} is public, and the wire is unencrypted", remedy=remedy)
    return good("plaintext", where, f"{address} is unencrypted, on a private network; only the secret protects it")


def router_address_finding(router: RouterConfig, *, where: str) -> Finding:
    """Check which clients a router accepts, and whether the port is encrypted."""
    if is_loopback(split_address(router.listen)[0]):
        return good("keys", where, f"{router.listen}: loopback only")
    how = "encrypted" if router.client_tls.certificate else "unencrypted: set client_tls, or terminate TLS before it"
    checks = [
        name for name, file in (("keys", router.api_keys_file), ("certificates", router.client_tls.authority)) if file
    ]
    if not checks:
        message = f"{router.listen} accepts all requests, as insecure_plaintext allows; it is {how}"
        return warning("keys", where, message, remedy="write api_keys_file: FILE with a key and a name in each line")
    return good("keys", where, f"{router.listen} requires {' and '.join(checks)}; it is {how}")


def legs_findings(router: RouterConfig, *, where: str) -> Iterator[Finding]:
    """Check the encryption of prefill legs to other clusters."""
    for cluster in router.clusters:
        if cluster.name != router.cluster and (cluster.kind == "prfaas" or router.cluster):
            legs = {instance.name: instance.url for instance in cluster.instances}
            yield from leg_findings(legs, router, where=where)


def leg_findings(urls: Mapping[str, str], settings: Any, *, where: str) -> Iterator[Finding]:
    """Check that requests to engines of another cluster are encrypted where KV is. `urls` are by instance."""
    for instance, url in urls.items():
        if settings.tls.certificate is None or url.startswith("https:") or is_loopback(urlsplit(url).hostname or ""):
            continue
        message = f"prompts for {instance} cross to another cluster unencrypted ({url}), although tls is set"
        yield bad(
            "plaintext",
            where,
            message,
            remedy="serve the engine over TLS: https:// in its url, and engine_tls: deployment",
        )


def _plaintext(address: str, *, is_encrypted: bool, where: str) -> Finding:
    """Check that a port beyond this machine is encrypted. Without consent, plain text has stopped the configuration."""
    if is_encrypted or is_loopback(split_address(address)[0]):
        return good("plaintext", where, f"{address}: {'encrypted' if is_encrypted else 'loopback only'}")
    remedy = "set tls with authority, certificate and key, and leave insecure_plaintext out"
    return warning("plaintext", where, f"{address} is unencrypted, as insecure_plaintext allows", remedy=remedy)


def why_unreached(address: str, *, timeout_seconds: float) -> str:
    """Return why a TCP connection to an address fails, or "" if it succeeds."""
    host, port = split_address(address)
    try:
        socket.create_connection((_here(host), port), timeout=timeout_seconds).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def advertised_finding(agent: AgentConfig, *, is_running: bool, timeout_seconds: float) -> Finding:
    """Check the address that other agents use. A forwarded address may be unreachable from here only."""
    advertised, subject, where = agent.advertise or agent.listen, _ADVERTISED, "agent"
    host, port = split_address(advertised)
    remedy = "write advertise: <address of this machine>:<port>"
    if agent.managers and host in ("0.0.0.0", "::"):
        message = f"other agents are given {advertised}, which is not an address of one machine"
        return bad(subject, where, message, remedy=remedy)
    remedy += f", as ip -brief address shows; if it is forwarded, test from another machine: nc -vz {host} {port}"
    if is_running and (why := why_unreached(advertised, timeout_seconds=timeout_seconds)):
        message = f"other agents are given {advertised}, which this machine cannot reach ({why})"
        return warning(subject, where, message, remedy=remedy)
    if why := _unresolved(host):
        message = f"advertise: other agents are given {advertised}, which does not resolve here ({why})"
        return bad(subject, where, message, remedy=f"getent hosts {host}; {remedy}")
    return good(subject, where, f"other agents are given {advertised}")


def _unresolved(host: str) -> str:
    """Return why a host name does not resolve, or "" if it does."""
    try:
        socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def wires_findings(router: RouterConfig, *, timeout_seconds: float) -> Iterator[Finding]:
    """Check in parallel that the agents of a router's instances accept connections."""
    named = [instance for cluster in router.clusters for instance in cluster.instances]
    with ThreadPoolExecutor(MAX_PARALLEL_CHECKS) as threads:
        ask = functools.partial(why_unreached, timeout_seconds=timeout_seconds)
        answers = list(threads.map(ask, [instance.wire for instance in named]))
    for instance, why in zip(named, answers, strict=True):
        if why:
            host, port = split_address(instance.wire)
            message = f"wire of {instance.name}: no connection to {instance.wire} ({why})"
            remedy = f"write the `listen` or `advertise` address of agent {instance.agent}, or start it; nc -vz {host} {port}"
            yield bad("wire", "router", message, remedy=remedy)
        else:
            yield good("wire", "router", f"wire of {instance.name}: {instance.wire} accepts connections")


def agent_finding(path: Path, *, where: str) -> Finding:
    """Check that an agent listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            remedy = "start prfaas-agent on this machine, or write the path of its `socket`; ss -lxp shows all sockets"
            return bad("agent_socket", where, f"no connection to {path} ({error.strerror})", remedy=remedy)
    return good("agent_socket", where, f"{path} accepts connections")


def clock_finding(page: str, *, is_named: bool, timeout_seconds: float, tls: ssl.SSLContext | None) -> Finding:
    """Compare this clock with a manager's, using the Date header of an answer.

    `is_named` is true when the settings name a manager.
    """
    try:
        asked = time.time()
        with urllib.request.urlopen(page.rstrip("/") + "/healthz", timeout=timeout_seconds, context=tls) as response:
            date = response.headers["Date"]
        manager_time = email.utils.parsedate_to_datetime(date).timestamp()
    except (OSError, ValueError, TypeError, http.client.HTTPException) as error:
        if not is_named:
            message = f"no manager is named and none answers at {page}; name one with --pages URL to compare clocks"
            return good("manager", "", message)
        return bad(
            "manager", "", f"{page} does not answer: {error}", remedy="name the http_listen address: --pages URL"
        )
    # The header is truncated to seconds. It lies between request and answer.
    offset_seconds = max(asked - manager_time - 1.0, manager_time - time.time(), 0.0)
    if offset_seconds > MAX_CLOCK_SECONDS:
        message = f"this clock and that of {page} differ by {offset_seconds:.0f} s; grants depend on them"
        return bad("clock", "", message, remedy="chronyc tracking on both; apt install chrony if missing")
    return good("clock", "", f"within {MAX_CLOCK_SECONDS:.0f} s of that of {page}")


def engine_findings(
    engine: EngineConfig, *, where: str, timeout_seconds: float, tls: ssl.SSLContext | None
) -> Iterator[Finding]:
    """Check that an engine answers and serves the configured model."""
    try:
        served: Any = read_json(engine.url.rstrip("/") + "/v1/models", timeout_seconds=timeout_seconds, tls=tls)
    except PageUnreachable as error:
        remedy = f"start it, or correct the url of {engine.instance}; curl {engine.url}/health"
        yield bad("engine", where, f"{engine.instance} does not answer: {error}", remedy=remedy)
        return
    names = [str(model.get("id")) for model in (served or {}).get("data", [])]
    if engine.model in names:
        yield good("engine_model", where, f"{engine.instance} serves {engine.model}")
        return
    message = f"{engine.instance} serves {', '.join(names)}, but the settings say {engine.model}"
    yield bad("engine_model", where, message, remedy=f"write model: {names[0] if names else 'its --served-model-name'}")


def shows(address: str, certificate: Path, *, timeout_seconds: float) -> bool:
    """Return whether the server at an address presents this certificate."""
    host, port = split_address(address)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        seen = ssl.get_server_certificate((_here(host), port), timeout=timeout_seconds)
        return "".join(seen.split()) in "".join(certificate.read_text().split())
    return False


def _here(host: str) -> str:
    """Return a loopback address for a wildcard address, or the host itself."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def answers(address: str, path: str, *, timeout_seconds: float, tls: ssl.SSLContext | None = None) -> bool:
    """Return whether a component's health page answers, plain or with TLS."""
    host, port = split_address(address)
    location = join_address(_here(host), port) + path
    urls = [f"http://{location}", *([f"https://{location}"] if tls else [])]
    return any(_answers(url, timeout_seconds=timeout_seconds, tls=tls) for url in urls)


def _answers(url: str, *, timeout_seconds: float, tls: ssl.SSLContext | None) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=timeout_seconds, context=tls):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except (OSError, http.client.HTTPException):
        return False
