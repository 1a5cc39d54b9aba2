"""What can only be found by trying: whether an address can be listened at, and who answers where."""

from __future__ import annotations

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prfaas.agent.config import AgentConfig, EngineConfig
from prfaas.console.doctor.finding import Finding, Subject, bad, good, warning
from prfaas.console.pages import read_json
from prfaas.errors import PageUnreachable
from prfaas.router.config import RouterConfig
from prfaas.transport.net.sockets import public_address
from prfaas.units import is_loopback, join_address, split_address

_ADVERTISED: Subject = "advertised_address"
_EVENTS = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:PORT"}'
MAX_ASKED = 32  # at the same time
MAX_CLOCK_SECONDS = 5.0  # grants live for minutes; certificates and logs are compared by the second


def port_finding(address: str, *, key: str, where: str, is_running: bool) -> Finding:
    """Return whether a component can listen at an address; while it runs, it does."""
    if is_running:
        return good("port", where, f"{key} {address}: in use by this component, which runs")
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
        remedy = f"ss -ltnp 'sport = :{port}' shows who; stop it, or write another port"
        return bad("port", where, f"{key} {address}: something else listens there", remedy=remedy)
    if error.errno == errno.EACCES:
        return bad("port", where, f"{key} {address}: only root may listen there", remedy="write a port above 1023")
    message = f"{key} {address}: not an address of this machine ({error.strerror})"
    return bad("address", where, message, remedy="ip -brief address shows them; write one of those")


def pages_finding(address: str, settings: Any, *, where: str) -> Finding:
    """Of pages, which are plain on loopback and wherever `insecure_plaintext` says so (`tls_proxy_for`)."""
    is_plain = settings.tls_certificate is None or settings.insecure_plaintext or is_loopback(split_address(address)[0])
    return _plaintext(address, settings, is_encrypted=not is_plain, where=where)


def calls_finding(address: str, settings: Any, *, where: str) -> Finding:
    """Of gRPC, which is encrypted wherever certificates are set."""
    return _plaintext(address, settings, is_encrypted=settings.tls_certificate is not None, where=where)


def wire_finding(address: str, agent: AgentConfig, *, where: str) -> Finding:
    """Of the wire, which private networks may have in plain text."""
    host, _ = split_address(address)
    is_encrypted = agent.tls_certificate is not None and not agent.insecure_plaintext
    with contextlib.suppress(OSError):
        if not (is_encrypted or agent.insecure_plaintext or is_loopback(host) or public_address(host)):
            return good(
                "plaintext", where, f"{address} is unencrypted, on a private network; the secret alone opens it"
            )
    return _plaintext(address, agent, is_encrypted=is_encrypted, where=where)


def front_door_finding(router: RouterConfig, *, where: str) -> Finding:
    """Of a router's own port: whom it lets ask, and whether it is encrypted."""
    if is_loopback(split_address(router.listen)[0]):
        return good("keys", where, f"{router.listen}: loopback only")
    how = (
        "encrypted" if router.client_tls_certificate else "unencrypted: set client_tls_*, or end clients' TLS before it"
    )
    asks = [
        what for what, its in (("keys", router.api_keys_file), ("certificates", router.client_tls_authority)) if its
    ]
    if not asks:
        message = f"{router.listen} takes everybody's requests, as insecure_plaintext says; it is {how}"
        return warning("keys", where, message, remedy="write api_keys_file: FILE with a key and a name in each line")
    return good("keys", where, f"{router.listen} asks for {' and '.join(asks)}; it is {how}")


def _plaintext(address: str, settings: Any, *, is_encrypted: bool, where: str) -> Finding:
    """Return whether what listens beyond this machine is encrypted, or meant not to be."""
    if is_encrypted or is_loopback(split_address(address)[0]):
        return good("plaintext", where, f"{address}: {'encrypted' if is_encrypted else 'loopback only'}")
    if settings.insecure_plaintext:
        remedy = "set tls_authority, tls_certificate and tls_key, and leave insecure_plaintext out"
        return warning("plaintext", where, f"{address} is unencrypted, as insecure_plaintext says", remedy=remedy)
    remedy = "set tls_authority, tls_certificate and tls_key"
    return bad("plaintext", where, f"{address} is beyond loopback without TLS, and the start is refused", remedy=remedy)


def why_unreached(address: str, *, timeout_seconds: float) -> str:
    """Why nobody takes a TCP connection at an address; "" where somebody does."""
    host, port = split_address(address)
    try:
        socket.create_connection((_here(host), port), timeout=timeout_seconds).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def advertised_finding(agent: AgentConfig, *, is_running: bool, timeout_seconds: float) -> Finding:
    """Return where other agents are told to go. From here a forwarded address may be out of reach that is not for them."""
    told, subject, where = agent.advertise or agent.listen, _ADVERTISED, "agent"
    host, port = split_address(told)
    remedy = "write advertise: <address of this machine>:<port>"
    if agent.managers and host in ("0.0.0.0", "::"):
        message = f"other agents are told to go to {told}, which is no machine's address"
        return bad(subject, where, message, remedy=remedy)
    remedy += (
        f", as ip -brief address shows it; where something forwards it, try from another machine: nc -vz {host} {port}"
    )
    if is_running and (why := why_unreached(told, timeout_seconds=timeout_seconds)):
        message = f"other agents are told to go to {told}, where nobody answers this machine ({why})"
        return warning(subject, where, message, remedy=remedy)
    if why := _unresolved(host):
        message = f"advertise: other agents are told to go to {told}, which does not resolve here ({why})"
        return bad(subject, where, message, remedy=f"getent hosts {host}; {remedy}")
    if agent.advertise and not is_running and not _is_own(host):
        message = f"other agents are told to go to {told}, which is no address of this machine"
        return warning(subject, where, message, remedy=remedy)
    return good(subject, where, f"other agents are told to go to {told}")


def _unresolved(host: str) -> str:
    """Why a host has no address; "" where it has one."""
    try:
        socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def _is_own(host: str) -> bool:
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind(address)
                return True
    return False


def wires_findings(router: RouterConfig, *, timeout_seconds: float) -> Iterator[Finding]:
    """Yield whether the agents that a router names take connections, asked at the same time."""
    named = [instance for cluster in router.clusters for instance in cluster.instances]
    with ThreadPoolExecutor(MAX_ASKED) as threads:
        ask = functools.partial(why_unreached, timeout_seconds=timeout_seconds)
        answers = list(threads.map(ask, [its.wire for its in named]))
    for its, why in zip(named, answers, strict=True):
        if why:
            host, port = split_address(its.wire)
            message = f"wire of {its.name}: nobody answers at {its.wire} ({why})"
            remedy = f"write where agent {its.agent} listens (its `listen` or `advertise`), or start it; nc -vz {host} {port}"
            yield bad("wire", "router", message, remedy=remedy)
        else:
            yield good("wire", "router", f"wire of {its.name}: {its.wire} takes connections")


def agent_finding(path: Path, *, where: str) -> Finding:
    """Return whether an agent listens at its Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            remedy = "start prfaas-agent on this machine, or write its `socket`; ss -lxp shows who listens where"
            return bad("agent_socket", where, f"nobody answers at {path} ({error.strerror})", remedy=remedy)
    return good("agent_socket", where, f"{path} takes connections")


def clock_finding(page: str, *, is_named: bool, timeout_seconds: float, tls: ssl.SSLContext | None) -> Finding:
    """How far this machine's clock is from a manager's, by the date of an answer; `is_named`: one is said to be there."""
    try:
        asked = time.time()
        with urllib.request.urlopen(page.rstrip("/") + "/healthz", timeout=timeout_seconds, context=tls) as response:
            date = response.headers["Date"]
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except (OSError, ValueError, TypeError, http.client.HTTPException) as error:
        if not is_named:
            message = f"none is named: no settings here, and none at {page}; with --pages URL clocks are compared"
            return good("manager", "", message)
        return bad(
            "manager", "", f"{page} does not answer: {error}", remedy="say where its http_listen is: --pages URL"
        )
    # A date is cut to the second, and lies between the question and the answer.
    off = max(asked - theirs - 1.0, theirs - time.time(), 0.0)
    if off > MAX_CLOCK_SECONDS:
        message = f"this clock and that of {page} differ by {off:.0f} s; grants expire by them"
        return bad("clock", "", message, remedy="chronyc tracking on both; apt install chrony where it is missing")
    return good("clock", "", f"within {MAX_CLOCK_SECONDS:.0f} s of that of {page}")


def events_findings(engine: EngineConfig, *, where: str, timeout_seconds: float) -> Iterator[Finding]:
    """Yield whether somebody listens where an engine is said to publish its KV events."""
    for key in ("kv_events", "kv_events_replay"):
        endpoint: str = getattr(engine, key)
        if not endpoint:
            continue
        scheme, _, place = endpoint.partition("://")
        if scheme == "ipc":
            why = "" if Path(place).is_socket() else "no such socket"
        else:
            why = why_unreached(place, timeout_seconds=timeout_seconds)
        if why:
            message = f"{key} of {engine.instance}: nobody publishes at {endpoint} ({why})"
            remedy = f"start the engine with --kv-events-config '{_EVENTS}' and the same port"
            yield bad("kv_events", where, message, remedy=remedy)
        else:
            yield good("kv_events", where, f"{key} of {engine.instance}: {endpoint} takes connections")


def engine_findings(
    engine: EngineConfig, *, where: str, timeout_seconds: float, tls: ssl.SSLContext | None
) -> Iterator[Finding]:
    """Yield whether an engine answers at its address and serves the model that it is announced with."""
    try:
        served: Any = read_json(engine.url.rstrip("/") + "/v1/models", timeout_seconds=timeout_seconds, tls=tls)
    except PageUnreachable as error:
        remedy = f"start it, or mend the url of {engine.instance}; curl {engine.url}/health"
        yield bad("engine", where, f"{engine.instance} does not answer: {error}", remedy=remedy)
        return
    names = [str(its.get("id")) for its in (served or {}).get("data", [])]
    if engine.model in names:
        yield good("engine_model", where, f"{engine.instance} serves {engine.model}")
        return
    message = f"{engine.instance} serves {', '.join(names)}, and is announced with {engine.model}"
    yield bad("engine_model", where, message, remedy=f"write model: {names[0] if names else 'its --served-model-name'}")


def shows(address: str, certificate: Path, *, timeout_seconds: float) -> bool:
    """Return whether who listens at an address has this certificate, be it one that asks for another's."""
    host, port = split_address(address)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        seen = ssl.get_server_certificate((_here(host), port), timeout=timeout_seconds)
        return "".join(seen.split()) in "".join(certificate.read_text().split())
    return False


def _here(host: str) -> str:
    """At which address of this machine a listener at all of them is reached."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def answers(address: str, path: str, *, timeout_seconds: float, tls: ssl.SSLContext | None = None) -> bool:
    """Return whether a component's health page is there, plain or by its own certificate."""
    host, port = split_address(address)
    at = join_address(_here(host), port) + path
    urls = [f"http://{at}", *([f"https://{at}"] if tls else [])]
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
