"""Checks of settings: accepted forms, and settings that depend on or exclude each other."""

import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prfaas.units import is_loopback, is_public, split_address

GIVEN = object()  # Any value that is not empty.
ABSENT = object()  # An empty value.
# Required value of another setting, by its name: a value, a set of values, `GIVEN` or `ABSENT`.
Conditions = Mapping[str, Any]
_EMPTY = (None, "", ())
_ALL_HOSTS = {"0.0.0.0", "::"}
_LOCALHOSTS = {"127.0.0.1", "::1"}
MAX_SOCKET_PATH_BYTES = 107  # `sun_path` of unix(7) has 108 bytes, with the final zero.
MAX_SALT_CHARS = 128
_SALT_FORBIDDEN = frozenset("@/\\\x00")  # As in vLLM's validate_cache_salt, like the length.
# A host name is accepted; DNS limits it to 253 characters.
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", re.ASCII)


def unmet(conditions: Conditions, config: Any) -> dict[str, Any]:
    """Return the conditions that a configuration does not meet."""
    return {name: wanted for name, wanted in conditions.items() if not _is_met(wanted, getattr(config, name))}


def _is_met(wanted: Any, value: Any) -> bool:
    if wanted is GIVEN or wanted is ABSENT:
        return (value in _EMPTY) == (wanted is ABSENT)
    return value in wanted if isinstance(wanted, frozenset) else bool(value == wanted)


def describe(conditions: Conditions) -> str:
    """Return the conditions as users write them: "fidelity: instances, shared: true"."""
    return ", ".join(_shown(name, wanted) for name, wanted in conditions.items())


def _shown(name: str, wanted: Any) -> str:
    if wanted is GIVEN or wanted is ABSENT:
        return name if wanted is GIVEN else f"no {name}"
    values = wanted if isinstance(wanted, frozenset) else {wanted}
    return f"{name}: {' or '.join(sorted(map(_written, values)))}"


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_together(config: Any, *names: str) -> None:
    """Raise ValueError when only some of these settings are given."""
    missing = [name for name in names if getattr(config, name) is None]
    if 0 < len(missing) < len(names):
        raise ValueError(f"{missing[0]}: missing; {', '.join(names)} go together")


def check_tls(config: Any) -> None:
    """Raise ValueError when `tls` names no authority for a certificate. Components always check the other side."""
    if config.tls.certificate is not None and config.tls.authority is None:
        raise ValueError("tls: authority: missing; authority, certificate and key go together")


def check_node_name(name: str, text: str) -> None:
    """Raise ValueError unless a node can have this name. Names stand in lists (name=host:port), URLs and certificates."""
    if not _NODE_NAME.fullmatch(text):
        raise ValueError(f"{name}: {text!r}; write letters, digits, '.', '_' and '-', such as west-0")


def check_url(name: str, url: str, *, such_as: str = "http://host:port") -> None:
    """Raise ValueError unless this is an HTTP URL with a host."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # The host or the port is malformed.
        is_valid = False
    if not is_valid:
        raise ValueError(f"{name}: {url!r}; write {such_as}")


def check_addresses(name: str, addresses: Iterable[str]) -> None:
    """Raise ValueError when one of a setting's addresses is not host:port."""
    for address in addresses:
        try:
            split_address(address)
        except ValueError as error:
            raise ValueError(f"{name}: {address!r}: {error}; write host:port such as 10.0.0.5:7410") from error


def check_socket_path(name: str, path: Path) -> None:
    """Raise ValueError when the path is too long for a Unix socket."""
    if (length := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
        form = f"write one that makes it at most {MAX_SOCKET_PATH_BYTES}"
        raise ValueError(f"{name}: {path} would be the path of a Unix socket and has {length} bytes; {form}")


def check_apart(config: Any, *names: str) -> None:
    """Raise ValueError when two of these listening addresses are the same."""
    for first, second in itertools.combinations([name for name in names if getattr(config, name)], 2):
        (host, port), (second_host, second_port) = (split_address(getattr(config, name)) for name in (first, second))
        if port == second_port != 0 and _overlap(host.lower(), second_host.lower()):
            raise ValueError(f"{second}: {getattr(config, second)} is also used by {first}; write another port")


def _overlap(host: str, second_host: str) -> bool:
    hosts = {host, second_host}
    return len(hosts) == 1 or bool(hosts & _ALL_HOSTS) or ("localhost" in hosts and bool(hosts & _LOCALHOSTS))


def check_engine_tls(config: Any) -> None:
    """Raise ValueError when `engine_tls` asks for the deployment's certificates and none are given."""
    if config.engine_tls == "deployment" and config.tls.authority is None:
        raise ValueError("engine_tls: deployment needs tls with authority, certificate and key")


def check_consent(config: Any, *names: str) -> None:
    """Raise ValueError when an address is beyond loopback without certificates or `insecure_plaintext`."""
    for name in names:
        _check_consent(config, name, "beyond loopback", lambda host: not is_loopback(host))


def check_consent_of_wire(config: Any, name: str) -> None:
    """Raise ValueError when an agent's address is public without certificates. Private networks may use plain text."""
    _check_consent(config, name, "not a private address", is_public)


def _check_consent(config: Any, name: str, beyond: str, is_beyond: Callable[[str], bool]) -> None:
    address = getattr(config, name)
    if config.tls.authority or config.insecure_plaintext or not address:
        return
    if is_beyond(split_address(address)[0]):
        raise ValueError(f"{name}: {address} is {beyond}; set tls or insecure_plaintext: true")


def check_salt(name: str) -> None:
    """Check that engines accept this name as a salt. An empty name is no salt.

    Raises:
        ValueError: engines refuse it.
    """
    if len(name) > MAX_SALT_CHARS or _SALT_FORBIDDEN.intersection(name):
        raise ValueError(f"{name!r} is no valid salt; write at most {MAX_SALT_CHARS} characters without @ / \\")
