"""Discovery of instances without a manager: agents behind a DNS name or Kubernetes labels list their engines."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec

from prfaas import logs
from prfaas.errors import ConfigError
from prfaas.router.engines.fleet import InstanceAddress, addresses_of
from prfaas.types import ClusterKind, InstanceRole
from prfaas.units import join_address, split_address

INTERVAL_SECONDS = 10.0
EXPIRY_SECONDS = 30.0  # An agent that has not answered for so long counts as stopped, with its engines.
RESPONSE_SECONDS = 5.0
MAX_PAGE_BYTES = 1 << 20
MAX_PODS_BYTES = 64 << 20  # A pod of the list has about 10 KB.
AGENT_PORT = 7401  # Port of the pods' agent pages.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
T = TypeVar("T")
_log = logs.get("router.discovery")


class _EngineEntry(msgspec.Struct):
    instance: str
    url: str
    role: InstanceRole


class _NodePage(msgspec.Struct):
    name: str
    cluster: str
    cluster_kind: ClusterKind
    wire_address: str
    engines: list[_EngineEntry]


class _PodStatus(msgspec.Struct):
    podIP: str = ""
    phase: str = ""


class _Pod(msgspec.Struct):
    status: _PodStatus


class _Pods(msgspec.Struct):
    items: list[_Pod]


_NODE, _PODS = msgspec.json.Decoder(_NodePage), msgspec.json.Decoder(_Pods)
_FAILURES = (aiohttp.ClientError, OSError, TimeoutError, ValueError)  # The errors of msgspec are ValueErrors.


@dataclass(frozen=True)
class ServiceAccount:
    """API server and account of a pod. Without `tls` the server is asked in plain text."""

    api: str
    namespace: str
    token_file: Path
    tls: ssl.SSLContext | None

    @classmethod
    def read(cls) -> ServiceAccount:
        """Return the account of the router's own pod.

        Raises:
            ConfigError: the router runs in no pod, or a file of the account is unusable.
        """
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError("discovery.kubernetes_selector: works only in a pod of Kubernetes")
        token_file = SERVICE_ACCOUNT / "token"
        _read_account_file(token_file, Path.read_text)
        namespace = _read_account_file(SERVICE_ACCOUNT / "namespace", Path.read_text).strip()
        tls = _read_account_file(SERVICE_ACCOUNT / "ca.crt", lambda file: ssl.create_default_context(cafile=str(file)))
        return cls(f"https://{join_address(host, int(port))}", namespace, token_file, tls)


def _read_account_file(file: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(file)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"discovery.kubernetes_selector: {file} cannot be used: {reason}") from error


class KubernetesPods:
    """Running pods of the account's namespace that have the labels of `selector`."""

    def __init__(
        self, selector: str, account: ServiceAccount, session: aiohttp.ClientSession, *, port: int = AGENT_PORT
    ) -> None:
        self.selector = selector
        self._account = account
        self._session = session
        self._port = port

    async def pages(self) -> list[str] | None:
        """Return the address (host:port) of each pod's agent page; None if the API server does not answer."""
        query = urlencode({"labelSelector": self.selector})
        url = f"{self._account.api}/api/v1/namespaces/{self._account.namespace}/pods?{query}"
        try:
            token = self._account.token_file.read_text().strip()  # Kubernetes renews it about every hour.
            headers = {"Authorization": f"Bearer {token}"}
            async with asyncio.timeout(RESPONSE_SECONDS):
                async with self._session.get(url, ssl=self._account.tls or True, headers=headers) as response:
                    response.raise_for_status()
                    pods = _PODS.decode(await _read_body(response, MAX_PODS_BYTES)).items
        except _FAILURES as error:
            _log.warning("kubernetes.query_failed", error=repr(error))
            return None
        running = (pod.status.podIP for pod in pods if pod.status.phase == "Running" and pod.status.podIP)
        return [join_address(host, self._port) for host in running]


class Discovery:
    """Asks the agents every `INTERVAL_SECONDS`, and calls `found` after each change.

    `names` are DNS names (host:port) of agents' pages. With `tls` these pages are encrypted.
    """

    def __init__(
        self,
        names: Sequence[str],
        pods: KubernetesPods | None,
        *,
        session: aiohttp.ClientSession,
        tls: Callable[[], ssl.SSLContext] | None,
        found: Callable[[Sequence[InstanceAddress]], None],
        clock: Callable[[], float],
    ) -> None:
        self._names = names
        self._pods = pods
        self._session = session
        self._tls = tls
        self._found = found
        self._clock = clock
        self._latest_pages: dict[str, tuple[float, _NodePage]] = {}  # By agent.
        self._pages: dict[str, list[str]] = {}  # Last response of each name and selector.
        self._reported: list[InstanceAddress] = []

    async def watch_forever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_SECONDS)

    async def look(self) -> None:
        """Ask all agents once, and report a change."""
        sources: dict[str, Awaitable[list[str] | None]] = {name: _resolve(name) for name in dict.fromkeys(self._names)}
        if self._pods is not None:
            sources[self._pods.selector] = self._pods.pages()
        for source, found in zip(sources, await asyncio.gather(*sources.values()), strict=True):
            if found is not None:
                self._pages[source] = found
        pages = {page for found in self._pages.values() for page in found}
        for node in await asyncio.gather(*map(self._ask, sorted(pages))):
            if node is not None:
                self._latest_pages[node.name] = self._clock(), node
        since = self._clock() - EXPIRY_SECONDS
        self._latest_pages = {name: heard for name, heard in self._latest_pages.items() if heard[0] > since}
        found_now = (address for _, node in self._latest_pages.values() for address in addresses_of(node))
        addresses = sorted(found_now, key=lambda address: address.name)
        if addresses != self._reported:
            self._reported = addresses
            _log.info("fleet.discovered", instances=[address.name for address in addresses])
            self._found(addresses)

    async def _ask(self, page: str) -> _NodePage | None:
        scheme, tls = ("http", None) if self._tls is None else ("https", self._tls())
        try:
            async with asyncio.timeout(RESPONSE_SECONDS):
                url = f"{scheme}://{page}/node"
                async with self._session.get(url, ssl=tls or True, headers={"Authorization": ""}) as response:
                    response.raise_for_status()
                    return _NODE.decode(await _read_body(response, MAX_PAGE_BYTES))
        except _FAILURES as error:
            _log.warning("agent.discovery_failed", page=page, error=repr(error))
            return None


async def _read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of a response, or raise ValueError if it is longer than `max_bytes`."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise ValueError(f"more than {max_bytes} bytes")
    return bytes(body)


async def _resolve(name: str) -> list[str] | None:
    """Return every address (host:port) of a name; None if it does not resolve."""
    host, port = split_address(name)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        _log.warning("agent.name_lookup_failed", name=name, error=str(error))
        return None
    return [join_address(str(address[0]), port) for _, _, _, _, address in found]
