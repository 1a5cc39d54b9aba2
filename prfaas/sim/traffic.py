"""The requests of one run: drawn from a workload, or those of a recorded trace at its own times."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from prfaas.errors import ConfigError
from prfaas.model.workload import Workload
from prfaas.sim.arrivals import arrivals
from prfaas.sim.prefix_cache import block_name
from prfaas.sim.request import Request
from prfaas.sim.sampling import requests_of
from prfaas.solve.trace_file import read_requests

_MILLISECOND = 1e-3  # the unit of timestamps in traces with hash ids, as Mooncake publishes them
_DEFAULT_OUTPUT_TOKENS = 1024


def draw_requests(workload: Workload, process: str, *, count: int, rate: float, seed: int) -> list[Request]:
    """`count` requests of a workload, arriving by a process of `arrivals` at `rate` per second."""
    times, sizes = np.random.SeedSequence(seed).spawn(2)
    moments = arrivals(process, count, rate, np.random.default_rng(times))
    return requests_of(workload, moments, np.random.default_rng(sizes))


def recorded_requests(path: Path, *, count: int) -> list[Request]:
    """The first `count` requests of a file, at its timestamps: milliseconds where it has hash ids, else seconds.

    Raises:
        ConfigError: the file cannot be used, or has no timestamps.
    """
    rows, _ = read_requests(path)
    unit = _MILLISECOND if any(row.blocks for row in rows) else 1.0
    requests = []
    for index, row in enumerate(rows[:count]):
        if row.timestamp is None:
            raise ConfigError(f"{path}: request {index + 1} has no timestamp, so arrivals cannot be its own")
        requests.append(
            Request(
                index,
                row.timestamp * unit,
                prompt_tokens=int(row.prompt_tokens),
                output_tokens=int(row.output_tokens or _DEFAULT_OUTPUT_TOKENS),
                cached_tokens=int(row.cached_tokens),
                turn=row.turn,
                blocks=[block_name(number) for number in row.blocks],
            )
        )
    return requests


def longest_tokens(requests: Iterable[Request]) -> int:
    """Prompt and answer of the longest one."""
    return max(one.num_prompt_tokens + one.num_output_tokens for one in requests)
