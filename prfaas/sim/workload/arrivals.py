"""Arrival processes: Poisson, gamma and daily waves, from a seeded generator."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from prfaas import config
from prfaas.config import setting
from prfaas.errors import ConfigError
from prfaas.model.cost.curve import FloatArray
from prfaas.solve.files.quantities import NUMBER

Generator = np.random.Generator
Process = Callable[["ArrivalSpec", int, float, Generator], FloatArray]
_GAMMA, _DIURNAL = ({"process": name} for name in ("gamma", "diurnal"))


@dataclass(frozen=True)
class ArrivalSpec:
    """Parameters of the processes; each process takes its own."""

    process: str = setting("text", required=True, doc="One of `PROCESSES`.")
    cv: float = setting(
        NUMBER, default=2.0, minimum=0.05, only_where=_GAMMA, doc="Standard deviation of the gaps over their mean."
    )
    period: float = setting(
        "seconds", default=86_400.0, minimum=1.0, only_where=_DIURNAL, doc="Time from one peak to the next."
    )
    depth: float = setting(
        "ratio", default=0.5, maximum=1.0, only_where=_DIURNAL, doc="Swing of the rate around its mean."
    )


def poisson(spec: ArrivalSpec, count: int, rate: float, generator: Generator) -> FloatArray:
    """Return arrivals with independent exponential gaps."""
    return np.cumsum(generator.exponential(1.0 / rate, count))


def gamma(spec: ArrivalSpec, count: int, rate: float, generator: Generator) -> FloatArray:
    """Return arrivals with gaps of coefficient of variation `cv`; above 1 they come in bursts."""
    shape = spec.cv**-2
    return np.cumsum(generator.gamma(shape, 1.0 / (rate * shape), count))


def diurnal(spec: ArrivalSpec, count: int, rate: float, generator: Generator) -> FloatArray:
    """Return a Poisson process whose rate is rate · (1 + depth · sin(2π t / period))."""
    expected = np.cumsum(generator.exponential(1.0, count))
    turn, low, high = 2 * math.pi / spec.period, expected * 0.0, expected / rate + spec.period
    # The integral of the rate rises, so bisection inverts it.
    for _ in range(60):
        middle = 0.5 * (low + high)
        reached = rate * (middle + spec.depth / turn * (1.0 - np.cos(turn * middle)))
        low, high = np.where(reached < expected, middle, low), np.where(reached < expected, high, middle)
    times: FloatArray = 0.5 * (low + high)
    return times


PROCESSES: Mapping[str, Process] = MappingProxyType({
    "poisson": poisson,
    "gamma": gamma,
    "diurnal": diurnal,
})  # fmt: skip


def arrivals(text: str, count: int, rate: float, generator: Generator) -> FloatArray:
    """Return the first `count` arrival times of a description such as "gamma:cv=3", in seconds, ascending.

    Raises:
        ConfigError: the process or a unit is unknown, or the process does not take a key.
    """
    kind, _, rest = text.partition(":")
    process = PROCESSES.get(kind.strip())
    if process is None:
        raise ConfigError(f"arrivals {text!r}: none of {', '.join(PROCESSES)}, trace")
    pairs = [item.partition("=") for item in rest.split(",") if item.strip()]
    values = {key.strip(): value.strip() for key, _, value in pairs}
    spec = config.load_mapping(ArrivalSpec, {**values, "process": kind.strip()}, where=f"arrivals {text!r}")
    return process(spec, count, rate, generator)
