"""Text forms of the planner's quantities: numbers, prices, tokens per second, loads."""

from __future__ import annotations

import math

from prfaas.units import ValueKind, parse_ratio


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError("not a finite number of at least 0")
    return value


def _speed(text: str) -> float:
    value = text.strip()
    if not value.endswith("tok/s"):
        raise ValueError("unit tok/s missing")
    return _number(value.removesuffix("tok/s"))


def _load(text: str) -> tuple[str, float]:
    value = text.strip()
    if value.endswith("req/s"):
        return "rate", _number(value.removesuffix("req/s"))
    return "ratio", parse_ratio(value)


NUMBER = ValueKind('a number such as "0.5" or "1.3e-4"', _number, repr)
TOKENS_PER_SECOND = ValueKind('a speed such as "40tok/s"', _speed, lambda value: f"{value:g}tok/s")
LOAD = ValueKind('a part of the greatest throughput such as "80%", or a rate such as "2.5req/s"', _load, str)


def show_tokens(value: float) -> str:
    """Return a number of tokens in short form: "19.4K", "512"."""
    return f"{value / 1000:.1f}K" if value >= 1000 else f"{value:.0f}"


def show_gbps(bytes_per_second: float) -> str:
    """Return bytes per second as Gbit/s."""
    return f"{bytes_per_second * 8 / 1e9:.1f} Gbps"


def show_seconds(value: float) -> str:
    """Return seconds, or "unbounded" for infinity."""
    return "unbounded" if math.isinf(value) else f"{value:.2f} s"
