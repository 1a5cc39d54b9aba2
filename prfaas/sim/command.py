"""Runs of `prfaas-sim`: one scenario, or one run per value of a setting."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

from prfaas import config
from prfaas.errors import ConfigError
from prfaas.sim.run import SimulationRun, arrival_rate, prepare, simulate
from prfaas.sim.scenario import Scenario

# Called with the number of finished inputs and of all inputs.
Progress = Callable[[int, int], None]
Input = TypeVar("Input")
Output = TypeVar("Output")


def on_all_cores(work: Callable[[Input], Output], inputs: Sequence[Input], progress: Progress) -> list[Output]:
    """Return `work` of each input in order, computed by processes; `work` is a function of a module."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(len(inputs), os.cpu_count() or 1)), mp_context=context) as workers:
        futures = [workers.submit(work, value) for value in inputs]
        outputs = []
        for done, future in enumerate(futures, start=1):
            outputs.append(future.result())
            progress(done, len(futures))
    return outputs


def read(file: Path | None, flags: Mapping[str, str], *, varied: str = "") -> Scenario:
    """Return the scenario of a file, the environment and the command line; `varied` names the setting to vary.

    Raises:
        ConfigError: as in `config.load`.
    """
    return config.load(Scenario, component="sim", file=file, flags=flags, varied=varied)


def run_one(file: Path | None, flags: Mapping[str, str]) -> list[tuple[str, SimulationRun]]:
    """Run the scenario."""
    scenario = read(file, flags)
    return [(scenario.variant, simulate(scenario))]


def compare(file: Path | None, flags: Mapping[str, str], choice: str) -> list[tuple[str, SimulationRun]]:
    """Return one run per value of "setting=a,b,c", all with the rate of the scenario without it and the same seed."""
    variants = _variants(file, flags, choice)
    base = read(file, flags, varied=_varied(choice))
    rate = arrival_rate(base, prepare(base))
    return [(name, simulate(scenario, rate=rate)) for name, scenario in variants]


def sweep(
    file: Path | None, flags: Mapping[str, str], choice: str, progress: Progress
) -> list[tuple[str, SimulationRun]]:
    """Return one run per value of "setting=a,b,c", each at its own load, on all cores."""
    variants = _variants(file, flags, choice)
    runs = on_all_cores(simulate, [scenario for _, scenario in variants], progress)
    return [(name, run) for (name, _), run in zip(variants, runs, strict=True)]


def _variants(file: Path | None, flags: Mapping[str, str], choice: str) -> Sequence[tuple[str, Scenario]]:
    setting, (_, _, values) = _varied(choice), choice.partition("=")
    known = {".".join(path) for path, _ in config.paths(Scenario)}
    if setting not in known or not values.strip():
        raise ConfigError(f'{choice!r}: write a setting and its values, "load=50%,80%,95%" or "variant=a,b"')
    named = [value.strip() for value in values.split(",")]
    return [(value, read(file, {**flags, setting: value}, varied=setting)) for value in named]


def _varied(choice: str) -> str:
    return choice.partition("=")[0].strip()
