"""Admission of requests: API keys, concurrent requests, and the tenant whose cache a client uses."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prfaas import grants
from prfaas.config_checks import check_salt
from prfaas.errors import ConfigError
from prfaas.router.config import RouterConfig
from prfaas.router.http.budget import ClientBudget
from prfaas.router.openai.headers import header_bytes

DEFAULT_CLIENT = "default"  # Owner of keys without a name, and every client if no keys are required.
_BEARER = "bearer "


class AdmissionRefused(Exception):
    """Request that is not admitted. `status` is 401, 408 or 429."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


# --- Tenants ---


@dataclass(frozen=True)
class Tenants:
    """Tenant of each client: the one that `of_clients` names, else the client's own name.

    The client `default` belongs to the tenant `default`. If that is empty, its requests have no salt.
    """

    of_clients: Mapping[str, str]
    default: str = ""

    @staticmethod
    def of_config(config: RouterConfig) -> Tenants:
        """Return the tenants of a router's clients."""
        return Tenants({client: tenant.tenant for tenant in config.tenants for client in tenant.clients}, config.tenant)

    def of(self, client: str) -> str:
        """Return the salt of a client's requests; empty for none."""
        return self.of_clients.get(client) or (self.default if client == DEFAULT_CLIENT else client)

    def check(self, clients: Iterable[str]) -> None:
        """Check the tenant of each of these clients.

        Raises:
            ConfigError: engines refuse its name as a salt, or a client has the name of a tenant that it does not belong to.
        """
        shared = {*self.of_clients.values(), self.default}
        for client in sorted(set(clients)):
            try:
                check_salt(self.of(client))
            except ValueError as error:
                raise ConfigError(f"api_keys_file: client {client}: {error}") from error
            if client != DEFAULT_CLIENT and client in shared and client not in self.of_clients:
                raise ConfigError(f"tenants: {client} is also a client without a tenant; add it to a tenant's clients")


# --- Keys and admission ---


@dataclass(frozen=True)
class Client:
    """Client of a request, and the tenant whose cache serves it; empty for requests without a salt."""

    name: str
    tenant: str


class OperatorKeys:
    """Keys for the router's own pages. Without any, the pages are open if anybody may be a client."""

    def __init__(self, keys: Iterable[str], *, clients_are_known: bool) -> None:
        self._known = frozenset(map(_digest, keys))
        self._is_open = not (self._known or clients_are_known)

    def may_see(self, authorization: str | None) -> bool:
        """Return whether the Authorization header has an operator's key, or none is required."""
        return self._is_open or _digest(_key_of(authorization or "")) in self._known


class RequestAdmission:
    """Keys and concurrent requests of the clients. Without keys anybody is admitted."""

    def __init__(self, keys: Mapping[str, str], *, max_requests: int, tenants: Tenants) -> None:
        """Prepare the clients. `keys` maps each key to its client.

        Raises:
            ConfigError: a client's tenant is not valid.
        """
        tenants.check(keys.values())
        self._clients = {_digest(key): Client(name, tenants.of(name)) for key, name in keys.items()}
        self._anybody = Client(DEFAULT_CLIENT, tenants.of(DEFAULT_CLIENT))
        self.has_several_clients = len({*keys.values()}) > 1
        self._running = ClientBudget("requests", max_requests, has_reserve=self.has_several_clients)

    def admit(self, authorization: str | None) -> Client:
        """Return the client whose key the Authorization header has.

        Raises:
            AdmissionRefused: there is no valid key.
        """
        if not self._clients:
            return self._anybody
        client = self._clients.get(_digest(_key_of(authorization or "")))
        if client is None:
            raise AdmissionRefused(401, "no valid API key: send it as Authorization: Bearer <key>")
        return client

    @contextlib.contextmanager
    def place(self, client: Client) -> Iterator[None]:
        """Count one concurrent request of a client while the block runs.

        Raises:
            AdmissionRefused: the maximum number of requests is running, in total or for the client.
        """
        if not self._running.take(client.name):
            raise AdmissionRefused(429, "too many requests are running; retry later")
        try:
            yield
        finally:
            self._running.give_back(client.name)


def _key_of(authorization: str) -> str:
    """Return the key of an Authorization header; empty without one."""
    return authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else ""


def _digest(key: str) -> bytes:
    """Return the digest under which a key is looked up, so that the look-up time reveals nothing about keys."""
    return hashlib.sha256(header_bytes(key)).digest()


def read_clients(file: Path | None, *, setting: str) -> dict[str, str]:
    """Return the client of each key in a file. Each line has a key, and the client's name unless it is `default`.

    Raises:
        ConfigError: the file is unreadable, open to everybody or has no key, or a line has more than a key and a name.
    """
    clients: dict[str, str] = {}
    for line in _read_lines(file, setting):
        key, *names = line.split()
        if len(names) > 1:
            raise ConfigError(f"{setting}: {file} has a line of {1 + len(names)} words; write KEY or KEY CLIENT")
        clients[key] = names[0] if names else DEFAULT_CLIENT
    return clients


def read_key(file: Path | None, *, setting: str) -> str:
    """Return the only key in a file; empty without a file.

    Raises:
        ConfigError: the file is unreadable or open to everybody, or has no key or several.
    """
    keys = _read_lines(file, setting)
    if len(keys) > 1:
        raise ConfigError(f"{setting}: {file} has {len(keys)} keys; write one")
    return keys[0] if keys else ""


def _read_lines(file: Path | None, setting: str) -> list[str]:
    """Return the lines of a file of keys, without empty lines and comments."""
    if file is None:
        return []
    try:
        grants.check_private(file, setting=setting)
        stripped = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: {file} cannot be read ({error})") from error
    lines = [line for line in stripped if line and not line.startswith("#")]
    if not lines:
        raise ConfigError(f"{setting}: {file} has no key; write one a line")
    return lines
