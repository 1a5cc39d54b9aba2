"""Whose cache a client's requests use: the tenant that it belongs to, whose name salts every hash of its prompts."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prfaas import metrics
from prfaas.errors import ConfigError
from prfaas.router.openai.headers import header_bytes

DEFAULT_CLIENT = "default"  # whose keys are without a name; everybody, where no keys are asked for
MAX_SALT_CHARS = 128
_FORBIDDEN = frozenset("@/\\\x00")  # as in vLLM's validate_cache_salt, with the length


def check_salt(name: str) -> None:
    """Return when an engine takes this name as a salt; empty is none.

    Raises:
        ValueError: it does not.
    """
    if len(name) > MAX_SALT_CHARS or _FORBIDDEN.intersection(name):
        raise ValueError(f"{name!r} is no salt that engines take; write at most {MAX_SALT_CHARS} characters, no @ / \\")


@dataclass(frozen=True)
class Tenants:
    """The tenant of each client: the one that `of_clients` names, else the client's own name.

    Clients without a name, and everybody where no keys are asked for, are of `default`; when that is empty, without a salt.
    """

    of_clients: Mapping[str, str]
    default: str = ""

    def of(self, client: str) -> str:
        """Return the salt of a client's requests; empty: none."""
        return self.of_clients.get(client) or (self.default if client == DEFAULT_CLIENT else client)

    def check(self, clients: Iterable[str]) -> None:
        """Return when each of these clients has a tenant that is meant to be its own or shared.

        Raises:
            ConfigError: a name that engines refuse as a salt, or a client named like a tenant that it is not of.
        """
        shared = {*self.of_clients.values(), self.default}
        for client in sorted(set(clients)):
            try:
                check_salt(self.of(client))
            except ValueError as error:
                raise ConfigError(f"api_keys_file: client {client}: {error}") from error
            if client != DEFAULT_CLIENT and client in shared and client not in self.of_clients:
                raise ConfigError(f"tenants: {client} is also a client, of none; name it under its tenant's clients")


MINUTE_SECONDS = 60.0
Limit = Literal["requests", "tokens"]
_LEAST: Mapping[Limit, float] = {"requests": 1.0, "tokens": math.ulp(1.0)}  # for one request to be let in


@dataclass(frozen=True)
class Quota:
    """What one client may have in a minute; 0: as much as it likes."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0


@dataclass(frozen=True)
class QuotaExceeded:
    """A quota that is used up, and when there is some of it again."""

    limit: Limit
    wait_seconds: float


class TokenBucket:
    """What is left of a limit; `now` never goes back."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._most = float(per_minute)
        self._left = self._most
        self._at = now

    def wait_seconds(self, least: float, now: float) -> float:
        """Until `least` is there; 0 when it is."""
        self._left = min(self._most, self._left + (now - self._at) * self._most / MINUTE_SECONDS)
        self._at = now
        return max(0.0, (least - self._left) * MINUTE_SECONDS / self._most)

    def take(self, amount: float, now: float) -> None:
        """Take an amount, or give it back where it is negative."""
        self.wait_seconds(0.0, now)
        self._left = min(self._most, self._left - amount)


class Quotas:
    """The quotas of all clients of one router."""

    def __init__(self, by_client: Mapping[str, Quota], default: Quota, clock: Callable[[], float]) -> None:
        """`default` holds for each client that `by_client` does not name, for each its own."""
        self._by_client = by_client
        self._default = default
        self._clock = clock
        self._buckets: dict[str, dict[Limit, TokenBucket]] = {}

    def admit(self, client: str) -> QuotaExceeded | None:
        """Take one request, or say what is used up."""
        buckets = self._of(client)
        if not buckets:
            return None
        now = self._clock()
        waits = {limit: bucket.wait_seconds(_LEAST[limit], now) for limit, bucket in buckets.items()}
        limit = max(waits, key=lambda its: waits[its])
        if waits[limit] > 0:
            return QuotaExceeded(limit, waits[limit])
        if "requests" in buckets:
            buckets["requests"].take(1.0, now)
        return None

    def charge(self, client: str, num_tokens: int) -> None:
        """Take tokens; a negative number gives back."""
        bucket = self._of(client).get("tokens")
        if bucket is not None:
            bucket.take(num_tokens, self._clock())

    def _of(self, client: str) -> dict[Limit, TokenBucket]:
        """Return a client's buckets, of what is limited; clients are named by the router's own files, so there are few."""
        buckets = self._buckets.get(client)
        if buckets is None:
            its, now = self._by_client.get(client, self._default), self._clock()
            limits: dict[Limit, int] = {"requests": its.requests_per_minute, "tokens": its.tokens_per_minute}
            buckets = {name: TokenBucket(per_minute, now) for name, per_minute in limits.items() if per_minute}
            self._buckets[client] = buckets
        return buckets


_BEARER = "bearer "


@dataclass(frozen=True)
class Client:
    """Who asks, and whose cache serves him; `tenant` empty: that of all who have none."""

    name: str
    tenant: str


class AdmissionRefused(Exception):
    """A request that is turned away; `status` is 401, or 429 with when to come again."""

    def __init__(self, status: int, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class OperatorKeys:
    """Who may see the router's own pages: those with a key of theirs; everybody where anybody may be a client."""

    def __init__(self, keys: Iterable[str], *, clients_are_known: bool) -> None:
        self._known = frozenset(map(_digest, keys))
        self._everybody = not (self._known or clients_are_known)

    def may_see(self, authorization: str | None) -> bool:
        """Return whether the Authorization header carries an operator's key, or none is asked for."""
        return self._everybody or _digest(_key_in(authorization or "")) in self._known


class RequestAdmission:
    """Keys of the clients, their quotas, and places for their requests. Without keys anybody may come."""

    def __init__(self, keys: Mapping[str, str], *, max_requests: int, quotas: Quotas, tenants: Tenants) -> None:
        """`keys`: to which client each belongs.

        Raises:
            ConfigError: a client's tenant cannot be one.
        """
        tenants.check(keys.values())
        self._clients = {_digest(key): Client(name, tenants.of(name)) for key, name in keys.items()}
        self._everybody = Client(DEFAULT_CLIENT, tenants.of(DEFAULT_CLIENT))
        self._max_requests = max_requests
        self._quotas = quotas
        self._num_requests = 0

    def admit(self, authorization: str | None) -> Client:
        """Return the client whose key the Authorization header carries; one request of its quota is taken.

        Raises:
            NotLetIn: it carries none, or one that is not known; or its client's quota is used up.
        """
        client = self._client(authorization or "")
        spent = self._quotas.admit(client.name)
        if spent is not None:
            metrics.QUOTA_REFUSALS.labels(client=client.name, limit=spent.limit).inc()
            message = (
                f"{client.name} has used up its {spent.limit} of this minute; come again in {spent.wait_seconds:.0f} s"
            )
            raise AdmissionRefused(429, message, retry_after_seconds=spent.wait_seconds)
        return client

    def charge(self, client: Client, num_tokens: int) -> None:
        """Take the estimate of a prompt out of a client's quota."""
        self._quotas.charge(client.name, num_tokens)

    def settle(self, client: Client, *, estimated: int, used: int) -> None:
        """Set the estimate right and count what was used."""
        metrics.CLIENT_TOKENS.labels(client=client.name).inc(used)
        self._quotas.charge(client.name, used - estimated)

    def _client(self, given: str) -> Client:
        if not self._clients:
            return self._everybody
        client = self._clients.get(_digest(_key_in(given)))
        if client is None:
            raise AdmissionRefused(401, "no valid API key: send it as Authorization: Bearer <key>")
        return client

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """One request while the block runs.

        Raises:
            NotLetIn: as many as may be are under way.
        """
        if self._num_requests >= self._max_requests:
            raise AdmissionRefused(429, f"{self._num_requests} requests are under way; come again")
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1


def _key_in(authorization: str) -> str:
    """Return the key of a header; empty where it has none."""
    return authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else ""


def _digest(key: str) -> bytes:
    """Keys are looked up by digest, so that the time of a look-up says nothing about a key."""
    return hashlib.sha256(header_bytes(key)).digest()


def read_clients(file: Path | None, *, setting: str) -> dict[str, str]:
    """Return the client of each key in a file, one key a line and after it, if it is not the default one, its client's name.

    Raises:
        ConfigError: the file cannot be read, has no key, or a line has more than a key and a name.
    """
    found: dict[str, str] = {}
    for line in _lines(file, setting):
        key, *names = line.split()
        if len(names) > 1:
            raise ConfigError(f"{setting}: {file} has a line of {1 + len(names)} words; write KEY or KEY CLIENT")
        found[key] = names[0] if names else DEFAULT_CLIENT
    return found


def read_key(file: Path | None, *, setting: str) -> str:
    """Return the one key in a file; empty without a file.

    Raises:
        ConfigError: the file cannot be read, or has none or several.
    """
    keys = _lines(file, setting)
    if len(keys) > 1:
        raise ConfigError(f"{setting}: {file} has {len(keys)} keys; write one")
    return keys[0] if keys else ""


def _lines(file: Path | None, setting: str) -> list[str]:
    """What a file of keys says; empty lines and those that begin with # say nothing."""
    if file is None:
        return []
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: {file} cannot be read ({error})") from error
    said = [line for line in lines if line and not line.startswith("#")]
    if not said:
        raise ConfigError(f"{setting}: {file} has no key; write one a line")
    return said
