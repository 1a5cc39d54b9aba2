"""Text forms of the planner's quantities: numbers, prices, tokens per second, loads."""

from __future__ import annotations

import math
import re

from prfaas.model.cost.egress_price import EgressPrice, PricePeriod
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


_PERIOD = re.compile(r"([0-9.]+)@([0-9.]+)-([0-9.]+)")


def _egress_price(text: str) -> EgressPrice:
    first, *rest = (item.strip() for item in text.split(","))
    periods = []
    for item in rest:
        parts = _PERIOD.fullmatch(item)
        if parts is None:
            raise ValueError(f"{item!r} is no price with hours")
        price, start, end = map(_number, parts.groups())
        if max(start, end) > 24:
            raise ValueError("hours go from 0 to 24")
        periods.append(PricePeriod(start, end, price))
    return EgressPrice(_number(first), tuple(periods))


def _show_egress_price(price: EgressPrice) -> str:
    periods = [f"{period.per_gb:g}@{period.start_hour:g}-{period.end_hour:g}" for period in price.periods]
    return ", ".join([f"{price.per_gb:g}", *periods])


EGRESS_PRICE = ValueKind(
    'a price per GB such as "0.05", or "0.05, 0.02@22-6" with hours of the day', _egress_price, _show_egress_price
)
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
