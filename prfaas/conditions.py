"""What settings ask of each other: beside which values of its neighbours one means something, which are given together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prfaas.units import is_loopback, is_public, split_address

GIVEN = object()  # any value but an empty one
ABSENT = object()  # an empty one
Conditions = Mapping[str, Any]  # by the other's name the value that it must have, a set of such, `GIVEN` or `ABSENT`
_EMPTY = (None, "", ())


def unmet(conditions: Conditions, config: Any) -> dict[str, Any]:
    """Those that a configuration does not meet."""
    return {name: wanted for name, wanted in conditions.items() if not _is_met(wanted, getattr(config, name))}


def _is_met(wanted: Any, value: Any) -> bool:
    if wanted is GIVEN or wanted is ABSENT:
        return (value in _EMPTY) == (wanted is ABSENT)
    return value in wanted if isinstance(wanted, frozenset) else bool(value == wanted)


def shown(conditions: Conditions) -> str:
    """As people write them: "fidelity: instances, shared: true"."""
    return ", ".join(_shown(name, wanted) for name, wanted in conditions.items())


def _shown(name: str, wanted: Any) -> str:
    if wanted is GIVEN or wanted is ABSENT:
        return name if wanted is GIVEN else f"no {name}"
    values = wanted if isinstance(wanted, frozenset) else {wanted}
    return f"{name}: {' or '.join(sorted(map(_written, values)))}"


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_together(config: Any, *names: str) -> None:
    """Raise ValueError when some of these settings are given and others are not."""
    missing = [name for name in names if getattr(config, name) is None]
    if 0 < len(missing) < len(names):
        raise ValueError(f"{missing[0]}: missing; {', '.join(names)} go together")


def check_engine_tls(config: Any) -> None:
    """Raise ValueError when engines are to be shown the deployment's certificates and none are given."""
    if config.engine_tls == "deployment" and config.tls_authority is None:
        raise ValueError("engine_tls: deployment needs tls_authority, tls_certificate and tls_key")


def check_consent(config: Any, *names: str) -> None:
    """Raise ValueError when one of these addresses is beyond loopback without certificates or a word of consent."""
    for name in names:
        _check_consent(config, name, "beyond loopback", lambda host: not is_loopback(host))


def check_consent_of_wire(config: Any, name: str) -> None:
    """The same of an agent's wire, which private networks may have in plain text."""
    _check_consent(config, name, "not a private address", is_public)


def _check_consent(config: Any, name: str, beyond: str, is_beyond: Callable[[str], bool]) -> None:
    address = getattr(config, name)
    if config.tls_authority or config.insecure_plaintext or not address:
        return
    if is_beyond(split_address(address)[0]):
        raise ValueError(f"{name}: {address} is {beyond}; set tls_* or insecure_plaintext: true")
