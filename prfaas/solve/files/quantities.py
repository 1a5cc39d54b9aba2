"""Text forms of the planner's quantities: numbers, prices, tokens per second, loads."""

import math
import re
from collections.abc import Callable

from prfaas.model.cost.egress_price import DAY_HOURS, ByHour, EgressPrice, Period
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
        return "rate", _rate(value)
    return "ratio", parse_ratio(value)


_PERIOD = re.compile(r"([^@]+)@([0-9.]+)-([0-9.]+)")


def _by_hour(text: str, number: Callable[[str], float]) -> ByHour:
    """Parse a value, and values with hours of the day."""
    items = [item.strip() for item in text.split(",")]
    bases = [number(item) for item in items if "@" not in item]
    if len(bases) != 1:
        raise ValueError("write one value without hours")
    periods = []
    for item in (item for item in items if "@" in item):
        parts = _PERIOD.fullmatch(item)
        if parts is None:
            raise ValueError(f"{item!r} has no hours such as 8-18")
        start, end = _number(parts[2]), _number(parts[3])
        if max(start, end) > DAY_HOURS:
            raise ValueError("hours go from 0 to 24")
        periods.append(Period(start, end, number(parts[1])))
    return ByHour(bases[0], tuple(periods))


_COMMITTED = "/Gbps"


def _egress_price(text: str) -> EgressPrice:
    items = text.split(",")
    committed = [item.strip().removesuffix(_COMMITTED) for item in items if item.strip().endswith(_COMMITTED)]
    rest = ",".join(item for item in items if not item.strip().endswith(_COMMITTED))
    prices = _by_hour(rest or "0", _number)
    return EgressPrice(prices.value, prices.periods, sum(map(_number, committed)))


def _show_egress_price(price: EgressPrice) -> str:
    periods = [f"{period.value:g}@{period.start_hour:g}-{period.end_hour:g}" for period in price.periods]
    committed = [f"{price.per_gbps_month:g}{_COMMITTED}"] if price.per_gbps_month else []
    return ", ".join([f"{price.value:g}", *periods, *committed])


def _rate(text: str) -> float:
    if not text.endswith("req/s"):
        raise ValueError("unit req/s missing")
    return _number(text.removesuffix("req/s"))


EGRESS_PRICE = ValueKind(
    'a price per GB such as "0.05", or "0.05, 0.02@22-6, 400/Gbps" with hours of the day and the price of a month for each'
    " Gbit/s of the 95th percentile",
    _egress_price,
    _show_egress_price,
)
PRICE_BY_HOUR = ValueKind(
    'a price such as "0.12", or "0.12, 0.08@22-6" with hours of the day', lambda text: _by_hour(text, _number), str
)
DEMAND = ValueKind(
    'requests per second such as "2.5req/s", or "0.5req/s, 2req/s@8-18" with hours of the day',
    lambda text: _by_hour(text, _rate),
    str,
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
