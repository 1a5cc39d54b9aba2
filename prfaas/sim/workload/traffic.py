"""Simulated requests, drawn from a workload's distributions or read from a trace."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from prfaas.errors import ConfigError
from prfaas.model.cost.curve import FloatArray
from prfaas.model.cost.workload import OutputTokens, Workload
from prfaas.sim.model.prefix_cache import block_name
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.workload.arrivals import Generator, arrivals
from prfaas.solve.files.traces import read_requests


def _outputs(output: OutputTokens, count: int, generator: Generator) -> FloatArray:
    """Return output lengths: all equal, or gamma with the workload's variance."""
    if not output.squared_cv:
        return np.full(count, output.mean)
    return generator.gamma(1.0 / output.squared_cv, output.mean * output.squared_cv, count)


def requests_of(workload: Workload, times: FloatArray, generator: Generator) -> list[SimulatedRequest]:
    """Return one request per arrival time in whole tokens."""
    new, cached = workload.lengths.draw(len(times), generator)
    whole_new = np.maximum(np.rint(new), 1).astype(int)
    prompts, hits = whole_new + np.rint(cached).astype(int), np.rint(cached).astype(int)
    outputs = np.maximum(np.rint(_outputs(workload.output, len(times), generator)), 1).astype(int)
    columns = zip(times.tolist(), prompts.tolist(), hits.tolist(), outputs.tolist(), strict=True)
    return [
        SimulatedRequest(index, time, num_prompt_tokens=prompt, num_output_tokens=output, num_cached_tokens=hit)
        for index, (time, prompt, hit, output) in enumerate(columns)
    ]


# Traces with hash ids, as Mooncake publishes them, have timestamps in this unit.
_MILLISECOND = 1e-3
_DEFAULT_OUTPUT_TOKENS = 1024


def draw_requests(workload: Workload, process: str, *, count: int, rate: float, seed: int) -> list[SimulatedRequest]:
    """Draw `count` requests of a workload that arrive by a process of `arrivals` at `rate` per second."""
    times, sizes = np.random.SeedSequence(seed).spawn(2)
    moments = arrivals(process, count, rate, np.random.default_rng(times))
    return requests_of(workload, moments, np.random.default_rng(sizes))


def recorded_requests(path: Path, *, count: int) -> list[SimulatedRequest]:
    """Return the first `count` requests of a file at its timestamps, in milliseconds with hash ids, else in seconds.

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
            SimulatedRequest(
                index,
                row.timestamp * unit,
                num_prompt_tokens=int(row.prompt_tokens),
                num_output_tokens=int(row.output_tokens or _DEFAULT_OUTPUT_TOKENS),
                num_cached_tokens=int(row.cached_tokens),
                turn=row.turn,
                blocks=[block_name(number) for number in row.blocks],
            )
        )
    return requests


def longest_tokens(requests: Iterable[SimulatedRequest]) -> int:
    """Return prompt and answer tokens of the longest request."""
    return max(request.num_prompt_tokens + request.num_output_tokens for request in requests)
