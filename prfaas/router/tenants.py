"""Whose cache a client's requests use: the tenant that it belongs to, whose name salts every hash of its prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prfaas.errors import ConfigError

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
        """The salt of a client's requests; empty: none."""
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
