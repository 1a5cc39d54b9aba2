"""Text forms of setting values: sizes, times, rates, counts, addresses.

`KINDS[kind].parse(text)` returns a value in base units (bytes, seconds, bytes per second).
`show` is the inverse: `parse(show(value)) == value`.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

KindName = Literal[
    "text", "path", "bytes", "seconds", "count", "ratio", "flag", "address", "rate", "tokens", "text_list"
]


@dataclass(frozen=True)
class ValueKind:
    """Kind of setting values, such as bytes or seconds.

    `parse` raises ValueError for a text that is not in the `accepted` form.
    """

    accepted: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str]


_BINARY_BYTES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTE_UNITS = {"": 1, "B": 1} | _BINARY_BYTES | _DECIMAL_BYTES
_SHORT_SECONDS = {"": Fraction(1), "s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}
SECOND_UNITS = _SHORT_SECONDS | {"m": Fraction(60), "h": Fraction(3600), "d": Fraction(86400)}
BIT_RATE_UNITS = {
    "bps": Fraction(1, 8),
    "Kbps": Fraction(125),
    "Mbps": Fraction(125_000),
    "Gbps": Fraction(125_000_000),
}
RATE_UNITS = BIT_RATE_UNITS | {f"{unit}/s": Fraction(size) for unit, size in BYTE_UNITS.items() if unit}
TOKEN_UNITS = {"": 1, "K": 10**3, "M": 10**6, "Ki": 1 << 10, "Mi": 1 << 20}
FLAG_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

_QUANTITY = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e[+-]?\d{1,3})?)\s*([A-Za-z/]*)", re.ASCII)
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})", re.ASCII)


def _quantity(text: str, units: Mapping[str, int | Fraction]) -> Fraction:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError("not a number with a unit")
    number, unit = match.groups()
    if unit not in units:
        raise ValueError(
            f"unit {unit!r} is none of {', '.join(name for name in units if name)}" if unit else "unit missing"
        )
    return Fraction(number.replace("_", "")) * units[unit]


def _whole(value: Fraction) -> int:
    if value.denominator != 1:
        raise ValueError("not a whole number")
    return int(value)


def parse_bytes(text: str) -> int:
    """Return a number of bytes from "4GiB", "1.5MB" or "4096"."""
    return _whole(_quantity(text, BYTE_UNITS))


def parse_seconds(text: str) -> float:
    """Return seconds from "10s", "500ms", "2m" or "0.5"."""
    return float(_quantity(text, SECOND_UNITS))


def parse_rate(text: str) -> float:
    """Return bytes per second from "10Gbps" or "1GB/s". A bare number is refused: bits and bytes are both common."""
    return float(_quantity(text, RATE_UNITS))


def parse_tokens(text: str) -> int:
    """Return a number of tokens from "32K" (32 000), "32Ki" (32 768) or "4096"."""
    return _whole(_quantity(text, TOKEN_UNITS))


def parse_count(text: str) -> int:
    """Return a whole number of at least 0, without a unit."""
    return _whole(_quantity(text, {"": 1}))


def parse_ratio(text: str) -> float:
    """Return a number from 0 to 1, also written "25%"."""
    scale = 100 if text.strip().endswith("%") else 1
    value = _quantity(text.strip().removesuffix("%"), {"": 1}) / scale
    if value > 1:
        raise ValueError("above 1")
    return float(value)


def parse_flag(text: str) -> bool:
    """Return True or False from "true", "yes", "on" and their opposites."""
    if text.strip().lower() not in FLAG_WORDS:
        raise ValueError("neither true nor false")
    return FLAG_WORDS[text.strip().lower()]


def split_address(address: str) -> tuple[str, int]:
    """Return the host, without the brackets of an IPv6 address, and the port of "host:port".

    Raises:
        ValueError: it is not of that form.
    """
    match = _ADDRESS.fullmatch(address.strip())
    if match is None:
        raise ValueError("not host:port")
    host, port = match[1].strip("[]"), int(match[2])
    if port > 65535:
        raise ValueError("the port is above 65535")
    return host, port


def join_address(host: str, port: int) -> str:
    """Return host:port, the form that `split_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a host name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_public(host: str) -> bool:
    """Return whether an address is outside private networks. A wildcard address is; a host name counts as private."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_unspecified or not address.is_private


def _parse_address(text: str) -> str:
    split_address(text)
    return text.strip()


def _parse_text(text: str) -> str:
    if not text.strip():
        raise ValueError("empty")
    return text.strip()


def _parse_text_list(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _parse_path(text: str) -> Path:
    try:
        return Path(_parse_text(text)).expanduser()
    except RuntimeError as error:
        raise ValueError("no home directory of that name") from error


def _show_in_largest(value: float, units: Mapping[str, int | Fraction]) -> str:
    """Return `value` in the largest unit that gives a whole number, else in the smallest unit."""
    exact = Fraction(repr(value))
    for unit, size in sorted(units.items(), key=lambda item: (-item[1], -len(item[0]))):
        if exact and not exact % size:
            return f"{exact // size}{unit}"
    unit, size = min(units.items(), key=lambda item: item[1])
    return f"{float(exact / size)!r}{unit}" if exact else f"0{unit}"


def show_bytes(value: int) -> str:
    """Return the text that `parse_bytes` reads back, in the largest unit that divides it."""
    return _show_in_largest(value, BYTE_UNITS)


def show_seconds(value: float) -> str:
    """Return the text that `parse_seconds` reads back."""
    if Fraction(repr(value)) % SECOND_UNITS["us"]:
        return f"{value!r}s"
    return _show_in_largest(value, {unit: size for unit, size in SECOND_UNITS.items() if unit}) if value else "0s"


def show_rate(value: float) -> str:
    """Return the text that `parse_rate` reads back, in bits per second where that is exact."""
    if Fraction(repr(value)) % BIT_RATE_UNITS["bps"]:
        return f"{value!r}B/s"
    return _show_in_largest(value, BIT_RATE_UNITS)


def show_tokens(value: int) -> str:
    """Return the text that `parse_tokens` reads back."""
    return _show_in_largest(value, TOKEN_UNITS)


KINDS: dict[KindName, ValueKind] = {
    "text": ValueKind("text", _parse_text, str),
    "path": ValueKind("a path", _parse_path, str),
    "bytes": ValueKind('a size such as "4GiB", "512MB" or "4096"', parse_bytes, show_bytes),
    "seconds": ValueKind('a time such as "10s", "500ms", "2m" or "0.5"', parse_seconds, show_seconds),
    "count": ValueKind('a whole number such as "8"', parse_count, str),
    "ratio": ValueKind('a number from 0 to 1 such as "0.5" or "50%"', parse_ratio, repr),
    "flag": ValueKind('"true" or "false"', parse_flag, lambda value: str(value).lower()),
    "address": ValueKind('host:port such as "10.0.0.5:9000" or "[::1]:9000"', _parse_address, str),
    "rate": ValueKind('a rate such as "10Gbps", "800Mbps" or "1GB/s"', parse_rate, show_rate),
    "tokens": ValueKind(
        'a number of tokens such as "32K" (32000), "32Ki" (32768) or "4096"', parse_tokens, show_tokens
    ),
    "text_list": ValueKind('a list of texts; on a command line "a,b,c"', _parse_text_list, ", ".join),
}


def choice(*words: str) -> ValueKind:
    """Return the kind of a setting whose value is one of `words`."""

    def parse(text: str) -> str:
        if text.strip() not in words:
            raise ValueError("not one of the accepted words")
        return text.strip()

    return ValueKind("one of " + ", ".join(f'"{word}"' for word in words), parse, str)
