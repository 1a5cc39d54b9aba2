"""A run in parts of equal length: how many requests were in each stage, how busy and how full everything was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from prfaas.model.curve import FloatArray
from prfaas.sim.meter import Load, since
from prfaas.sim.request import Request

NUM_BINS = 100
_STAGES: Mapping[str, Callable[[Request], tuple[float, float]]] = {
    "waiting": lambda one: (one.arrival, one.prefill_start),
    "prefill": lambda one: (one.prefill_start, one.prefill_end),
    "transfer": lambda one: (one.prefill_end, one.transfer_end),
    "decode": lambda one: (one.decode_start, one.decode_end),
}


def requests_over_time(requests: Sequence[Request], end: float) -> dict[str, tuple[float, ...]]:
    """Of each stage the mean number of requests in it, in each of `NUM_BINS` equal parts of [0, end] seconds.

    A request that never ended is left out.
    """
    edges = _edges(end)
    ended = [one for one in requests if one.decode_end == one.decode_end]
    counts = {}
    for name, between in _STAGES.items():
        moments = np.array([between(one) for one in ended]).reshape(-1, 2)
        each = np.ones(len(moments))
        spent = np.diff(since(moments[:, 0], each, edges) - since(moments[:, 1], each, edges))
        counts[name] = tuple((spent / (edges[1] - edges[0])).tolist())
    return counts


def loads_over_time(loads: Mapping[str, Load], end: float) -> dict[str, tuple[float, ...]]:
    """Each load in each of the same parts."""
    return {name: load.over(_edges(end)) for name, load in loads.items()}


def _edges(end: float) -> FloatArray:
    return np.linspace(0.0, max(end, 1e-12), NUM_BINS + 1)
