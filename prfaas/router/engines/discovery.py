"""Instances found without a manager: agents behind a DNS name or Kubernetes labels say what engines stand beside them."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec

from prfaas import logs
from prfaas.errors import ConfigError
from prfaas.router.config import DiscoveryConfig
from prfaas.router.engines.fleet import InstanceAddress
from prfaas.types import AgentName, ClusterKind, ClusterName, InstanceId, InstanceRole
from prfaas.units import join_address, split_address

ANSWER_SECONDS = 5.0
MAX_PAGE_BYTES = 1 << 20
MAX_PODS_BYTES = 64 << 20  # a pod of the list has about 10 KB
T = TypeVar("T")
_log = logs.get("router.discovery")


class _Engine(msgspec.Struct):
    instance: str
    url: str
    role: InstanceRole


class _Node(msgspec.Struct):
    name: str
    cluster: str
    cluster_kind: ClusterKind
    wire_address: str
    engines: list[_Engine]


class _PodStatus(msgspec.Struct):
    podIP: str = ""
    phase: str = ""


class _Pod(msgspec.Struct):
    status: _PodStatus


class _Pods(msgspec.Struct):
    items: list[_Pod]


_NODE, _PODS = msgspec.json.Decoder(_Node), msgspec.json.Decoder(_Pods)
_FAILURES = (aiohttp.ClientError, OSError, TimeoutError, ValueError)  # msgspec's errors are ValueErrors


class Discovery:
    """Asks every `interval` who is there; an agent that has not answered for `expiry` is gone, with its engines."""

    def __init__(
        self,
        config: DiscoveryConfig,
        *,
        session: aiohttp.ClientSession,
        tls: Callable[[], ssl.SSLContext] | None,
        found: Callable[[Sequence[InstanceAddress]], None],
        clock: Callable[[], float],
    ) -> None:
        """`tls`: how pages are asked for, and that they are encrypted; `found` hears of every change.

        Raises:
            ConfigError: this is no pod of Kubernetes, and the settings do not say where its API is.
        """
        self._config = config
        self._session = session
        self._tls = tls
        self._found = found
        self._clock = clock
        self._heard: dict[str, tuple[float, _Node]] = {}  # by agent
        self._pages: dict[str, list[str]] = {}  # by name or selector, as it last answered
        self._told: list[InstanceAddress] = []
        self._kubernetes = KubernetesPods(config, session) if config.kubernetes_selector else None

    async def watch_forever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._config.interval)

    async def look(self) -> None:
        """Ask once, and tell what has changed."""
        sources: dict[str, Awaitable[list[str] | None]] = {
            name: _resolved(name) for name in dict.fromkeys(self._config.names)
        }
        if self._kubernetes is not None:
            sources[self._config.kubernetes_selector] = self._kubernetes.pages()
        for source, found in zip(sources, await asyncio.gather(*sources.values()), strict=True):
            if found is not None:
                self._pages[source] = found
        pages = {page for found in self._pages.values() for page in found}
        for node in await asyncio.gather(*map(self._ask, sorted(pages))):
            if node is not None:
                self._heard[node.name] = self._clock(), node
        since = self._clock() - self._config.expiry
        self._heard = {name: heard for name, heard in self._heard.items() if heard[0] > since}
        addresses = sorted(self._addresses(), key=lambda its: its.name)
        if addresses != self._told:
            self._told = addresses
            _log.info("fleet.discovered", instances=[address.name for address in addresses])
            self._found(addresses)

    async def _ask(self, page: str) -> _Node | None:
        scheme, tls = ("http", None) if self._tls is None else ("https", self._tls())
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                url = f"{scheme}://{page}/node"
                async with self._session.get(url, ssl=tls or True, headers={"Authorization": ""}) as response:
                    response.raise_for_status()
                    return _NODE.decode(await _whole(response, MAX_PAGE_BYTES))
        except _FAILURES as error:
            _log.warning("agent.not_discovered", page=page, error=repr(error))
            return None

    def _addresses(self) -> Iterator[InstanceAddress]:
        for _, node in self._heard.values():
            for engine in node.engines:
                yield InstanceAddress(
                    name=InstanceId(engine.instance),
                    url=engine.url,
                    role=engine.role,
                    agent=AgentName(node.name),
                    wire=node.wire_address,
                    cluster=ClusterName(node.cluster),
                    cluster_kind=node.cluster_kind,
                )


async def _whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return an answer's body; ValueError when it is longer than `most`."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most:
            raise ValueError(f"more than {most} bytes")
    return bytes(body)


async def _resolved(name: str) -> list[str] | None:
    """host:port of every address that a name has; None while it does not resolve."""
    host, port = split_address(name)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        _log.warning("name.not_resolved", name=name, error=str(error))
        return None
    return [join_address(str(address[0]), port) for _, _, _, _, address in found]


@dataclass(frozen=True)
class ServiceAccount:
    """Where the API server is, and as whom it is asked; `tls` None: in plain text."""

    api: str
    namespace: str
    token_file: Path
    tls: ssl.SSLContext | None

    @classmethod
    def read(cls, config: DiscoveryConfig) -> ServiceAccount:
        """Raises ConfigError when nothing says where the API server is, or a file of the account cannot be used."""
        api, directory = config.kubernetes_api.rstrip("/") or _api_of_environment(), config.kubernetes_account
        _read(directory / "token", Path.read_text)
        namespace = _read(directory / "namespace", Path.read_text).strip()
        tls = _read(directory / "ca.crt", _trusting) if api.startswith("https") else None
        return cls(api, namespace, directory / "token", tls)


def _read(file: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(file)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        form = "write a directory with token, ca.crt and namespace"
        raise ConfigError(f"discovery.kubernetes_account: {file} cannot be used: {why}; {form}") from error


def _trusting(authority: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority))


class KubernetesPods:
    """The running pods of a namespace that carry the labels, from the API server, as the pod's service account may."""

    def __init__(self, config: DiscoveryConfig, session: aiohttp.ClientSession) -> None:
        """Raises ConfigError as `ServiceAccount.read`."""
        self._config = config
        self._session = session
        self._account = ServiceAccount.read(config)

    async def pages(self) -> list[str] | None:
        """host:port of each pod's agent page; None while the API server does not answer, which is logged."""
        query = urlencode({"labelSelector": self._config.kubernetes_selector})
        url = f"{self._account.api}/api/v1/namespaces/{self._account.namespace}/pods?{query}"
        try:
            token = self._account.token_file.read_text().strip()  # it is renewed every hour or so
            headers = {"Authorization": f"Bearer {token}"}
            async with asyncio.timeout(ANSWER_SECONDS):
                async with self._session.get(url, ssl=self._account.tls or True, headers=headers) as response:
                    response.raise_for_status()
                    pods = _PODS.decode(await _whole(response, MAX_PODS_BYTES)).items
        except _FAILURES as error:
            _log.warning("kubernetes.not_asked", error=repr(error))
            return None
        running = (pod.status.podIP for pod in pods if pod.status.phase == "Running" and pod.status.podIP)
        return [join_address(host, self._config.kubernetes_port) for host in running]


def _api_of_environment() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError("discovery.kubernetes_api: missing, and this is no pod of Kubernetes")
    return f"https://{join_address(host, int(port))}"
