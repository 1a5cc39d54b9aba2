"""A measured profile as the file that solver, twin and executor read (`prfaas/solve/files/profile_file.py`)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prfaas import logs
from prfaas.colocate.config import ColocateConfig
from prfaas.colocate.device import devices
from prfaas.colocate.device.runner import Row, Runner
from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.profile.prefill_load import PrefillLoad, model_for, prompt_parts, run_once
from prfaas.errors import ConfigError
from prfaas.model.cost.colocation import Colocation, InterferenceRatio, SharedPrefill, ShareTable


@dataclass(frozen=True)
class PrefillTime:
    """Seconds of a prompt of `num_tokens` behind `num_cached_tokens`, with the whole device and nothing beside it."""

    num_tokens: int
    seconds: float
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a decode step with the whole device and nothing beside it."""

    batch: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """Everything that one measurement yields."""

    hardware: str
    model: str
    source: str
    prefill: tuple[PrefillTime, ...]
    decode: tuple[StepTime, ...]
    colocation: Colocation


def write(measured: Measured, path: Path) -> None:
    """Write the file, whole or not at all; its name is the profile's."""
    text = yaml.safe_dump(_plain(measured, name=path.stem), sort_keys=False, width=120)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _plain(measured: Measured, *, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "hardware": measured.hardware,
        "model": measured.model,
        "source": measured.source,
        "prefill": {
            "fit": "quadratic",
            "points": [
                {"tokens": item.num_tokens, "cached": item.num_cached_tokens, "seconds": _seconds(item.seconds)}
                for item in measured.prefill
            ],
        },
        "decode": {
            "points": [
                {"batch": item.batch, "context": item.context_tokens, "step": _seconds(item.seconds)}
                for item in measured.decode
            ]
        },
        "colocation": _colocation(measured.colocation),
    }


def _colocation(measured: Colocation) -> dict[str, Any]:
    table = measured.decode
    decode = [
        {"batch": batch, "share": share, "step": _seconds(step)}
        for batch, row, together in zip(table.batches, table.seconds, table.overallocated_seconds, strict=True)
        for share, step in (*zip(table.shares, row, strict=True), (1.0, together))
    ]
    return {
        "partition": measured.partition,
        "context": measured.context_tokens,
        "decode": decode,
        "prefill": [
            {"tokens": item.num_tokens, "share": item.share, "seconds": _seconds(item.seconds)}
            for item in measured.prefill
        ],
        "interference": [
            {
                "batch": item.decode_batch,
                "tokens": item.num_new_tokens,
                "cached": item.num_cached_tokens,
                "ratio": round(item.ratio, 4),
            }
            for item in measured.interference
        ],
    }


def _seconds(value: float) -> float:
    return round(value, 7)


log = logs.get("colocate.measure")

WARM_UP_STEPS = 3
PROMPT_REPEATS = 3


@dataclass(frozen=True)
class Plan:
    """Plan of a measurement. An append-prefill adds `append_tokens` to `num_prefill_tokens` cached ones.

    128 behind 2,048 is what the authors of PPD measured.
    """

    batches: tuple[int, ...] = (1, 4, 16, 64)
    shares: tuple[float, ...] = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
    context_tokens: int = 1024
    num_prefill_tokens: int = 2048
    append_tokens: int = 128
    steps: int = 20

    @property
    def prompts(self) -> tuple[int, ...]:
        """Lengths that are prefilled with nothing beside them: three make a curve."""
        whole = self.num_prefill_tokens
        return whole // 4, whole // 2, whole


class DecodeBench:
    """Decode steps of a batch whose requests all have the same context."""

    def __init__(self, config: ColocateConfig, plan: Plan) -> None:
        tokens = plan.context_tokens + 1
        blocks = -(-tokens // config.block_tokens)
        largest = max(plan.batches)
        cache = CacheShape(largest * blocks + 1, config.block_tokens, largest + 1)
        shared = devices.allocate(config.shape, cache, dtype=config.dtype, seed=config.seed)
        model = devices.model_on(
            config.shape, cache, (shared[0].tensor, shared[1].tensor, shared[2].tensor), max_tokens=tokens
        )
        self._runner: Runner = devices.runner_on(
            model,
            "decode",
            partition=config.partition,
            max_rows=largest,
            max_blocks=blocks,
            num_threads=config.num_threads,
        )
        self._plan, self._blocks = plan, blocks

    def step_seconds(self, batch: int, *, share: float) -> float:
        """Return the median step, from its launch to its tokens on the host."""
        rows = [self._row(i) for i in range(batch)]
        seconds = []
        for _ in range(WARM_UP_STEPS + self._plan.steps):
            started = time.perf_counter()
            self._runner.decode(rows, share=share).tokens()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[WARM_UP_STEPS:])

    def _row(self, row: int) -> Row:
        blocks = list(range(1 + row * self._blocks, 1 + (row + 1) * self._blocks))
        return Row(row, 7, self._plan.context_tokens, row + 1, blocks)


@contextlib.contextmanager
def prefill_beside(load: PrefillLoad) -> Iterator[list[float]]:
    """A prefill process that is warm and runs until the block ends; then the list holds its seconds per prompt."""
    command = [sys.executable, "-m", "prfaas.colocate.profile.prefill_load", json.dumps(dataclasses.asdict(load))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        seconds = [float(process.stdout.readline())]
        try:
            yield seconds
        finally:
            process.stdin.close()
            seconds += [float(line) for line in process.stdout]


def measure(config: ColocateConfig, plan: Plan) -> Measured:
    """Return the whole profile; minutes on a CPU."""
    bench = DecodeBench(config, plan)
    alone = {batch: bench.step_seconds(batch, share=1.0) for batch in plan.batches}
    prefill, columns = _shares(config, plan, bench)
    full, append = _load(config, plan, share=1.0), _load(config, plan, share=1.0, append=True)
    (beside_full, whole), (beside_append, _) = (_overallocated(bench, plan, load) for load in (full, append))
    interference = tuple(
        InterferenceRatio(batch, load.num_new_tokens, load.num_cached_tokens, seconds[batch] / alone[batch])
        for load, seconds in ((full, beside_full), (append, beside_append))
        for batch in plan.batches
    )
    table = ShareTable(plan.shares, plan.batches, tuple(zip(*columns, strict=True)), tuple(beside_full.values()))
    return Measured(
        hardware=f"CPU {platform.machine()}",
        model=f"{config.shape} in {config.dtype}",
        source=f"prfaas-colocate profile, {_today()}: medians of {plan.steps} steps beside a prefill process",
        prefill=tuple(_alone(config, plan, tokens) for tokens in plan.prompts),
        decode=tuple(StepTime(batch, plan.context_tokens, seconds) for batch, seconds in alone.items()),
        colocation=Colocation(config.partition, plan.context_tokens, table, (*prefill, whole), interference),
    )


def _shares(
    config: ColocateConfig, plan: Plan, bench: DecodeBench
) -> tuple[tuple[SharedPrefill, ...], list[list[float]]]:
    """Prefill on the rest of each share, and a column of decode steps for each share."""
    prefill, columns = [], []
    for share in plan.shares:
        with prefill_beside(_load(config, plan, share=1 - share)) as seconds:
            columns.append([bench.step_seconds(batch, share=share) for batch in plan.batches])
        rest = round(1 - share, 6)
        prefill.append(SharedPrefill(plan.num_prefill_tokens, rest, statistics.median(seconds)))
        log.info("share.measured", decode_share=share, seconds=columns[-1])
    return tuple(prefill), columns


def write_profile(config: ColocateConfig, path: Path) -> None:
    """Measure with the default plan, batches cut to `max_rows`, and write the file.

    Raises:
        ConfigError: there is one core only, which cannot be shared.
    """
    batches = tuple(batch for batch in Plan().batches if batch <= config.max_rows)
    shares = core_shares(len(os.sched_getaffinity(0)))
    if not shares:
        raise ConfigError("one core cannot be shared: measure on a machine with two or more")
    plan = dataclasses.replace(Plan(), batches=batches, shares=shares)
    write(measure(config, plan), path)
    log.info("profile.written", path=str(path))


def _overallocated(bench: DecodeBench, plan: Plan, load: PrefillLoad) -> tuple[dict[int, float], SharedPrefill]:
    """Steps by batch and the prompts beside them, while both sides may use everything."""
    with prefill_beside(load) as seconds:
        steps = {batch: bench.step_seconds(batch, share=1.0) for batch in plan.batches}
    return steps, SharedPrefill(load.num_new_tokens, 1.0, statistics.median(seconds))


def _alone(config: ColocateConfig, plan: Plan, num_tokens: int) -> PrefillTime:
    """Return a prompt with nothing beside it, in this process."""
    load = dataclasses.replace(_load(config, plan, share=1.0), num_new_tokens=num_tokens)
    model, (_, part) = model_for(load), prompt_parts(load)
    seconds = [run_once(model, part) for _ in range(1 + PROMPT_REPEATS)][1:]
    return PrefillTime(num_tokens, statistics.median(seconds))


def _load(config: ColocateConfig, plan: Plan, *, share: float, append: bool = False) -> PrefillLoad:
    return PrefillLoad(
        shape=config.shape,
        dtype=config.dtype,
        partition=config.partition,
        share=share,
        num_new_tokens=plan.append_tokens if append else plan.num_prefill_tokens,
        num_cached_tokens=plan.num_prefill_tokens if append else 0,
        block_tokens=config.block_tokens,
        num_threads=config.num_threads,
    )


def core_shares(cores: int) -> tuple[float, ...]:
    """On a CPU a share is a number of cores: every split of them that leaves each side one, eight at most."""
    return tuple(round(i / cores, 4) for i in range(1, cores, -(-cores // 8)))


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
