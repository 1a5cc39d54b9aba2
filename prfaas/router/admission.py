"""Who is let in: a client with a key, while there is room."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.router.headers import header_bytes

_BEARER = "bearer "


class NotLetIn(Exception):
    """A request that is turned away; `status` is 401 or 429."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Admission:
    """Keys of the clients, and places for their requests. Without keys anybody may come."""

    def __init__(self, keys: frozenset[str], *, max_requests: int) -> None:
        self._digests = frozenset(map(_digest, keys))
        self._max_requests = max_requests
        self._num_requests = 0

    def check_key(self, authorization: str | None) -> None:
        """Return when the Authorization header carries one of the keys.

        Raises:
            NotLetIn: it carries none, or one that is not known.
        """
        if not self._digests:
            return
        given = authorization or ""
        if not given.lower().startswith(_BEARER) or _digest(given[len(_BEARER) :].strip()) not in self._digests:
            raise NotLetIn(401, "no valid API key: send it as Authorization: Bearer <key>")

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """One request while the block runs.

        Raises:
            NotLetIn: as many as may be are under way.
        """
        if self._num_requests >= self._max_requests:
            raise NotLetIn(429, f"{self._num_requests} requests are under way; come again")
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1


def _digest(key: str) -> bytes:
    """Keys are looked up by digest, so that the time of a look-up says nothing about a key."""
    return hashlib.sha256(header_bytes(key)).digest()


def read_keys(file: Path | None, *, setting: str) -> frozenset[str]:
    """The keys in a file, one a line; empty lines and those that begin with # are none.

    Raises:
        ConfigError: the file cannot be read, or has no key.
    """
    if file is None:
        return frozenset()
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: {file} cannot be read ({error})") from error
    keys = frozenset(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{setting}: {file} has no key; write one a line")
    return keys
