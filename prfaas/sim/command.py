"""What `prfaas-sim` runs: one scenario, or one for each value of a setting."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from prfaas import config
from prfaas.errors import ConfigError
from prfaas.sim.run import Run, arrival_rate, prepare, simulate
from prfaas.sim.scenario import Scenario

Progress = Callable[[int, int], None]  # runs done, of how many


def read(file: Path | None, flags: Mapping[str, str]) -> Scenario:
    """The scenario of a file, the environment and the command line.

    Raises:
        ConfigError: as `config.load` does.
    """
    return config.load(Scenario, component="sim", file=file, flags=flags)


def one(file: Path | None, flags: Mapping[str, str]) -> list[tuple[str, Run]]:
    """The scenario itself."""
    scenario = read(file, flags)
    return [(scenario.variant, simulate(scenario))]


def compare(file: Path | None, flags: Mapping[str, str], choice: str) -> list[tuple[str, Run]]:
    """A run for each value of "setting=a,b,c", all at the rate of the scenario without it, with the same seed."""
    base = read(file, flags)
    rate = arrival_rate(base, prepare(base))
    return [(name, simulate(scenario, rate=rate)) for name, scenario in _variants(file, flags, choice)]


def sweep(file: Path | None, flags: Mapping[str, str], choice: str, progress: Progress) -> list[tuple[str, Run]]:
    """A run for each value of "setting=a,b,c", each at its own load, on all cores."""
    variants = _variants(file, flags, choice)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(variants), os.cpu_count() or 1), mp_context=context) as workers:
        futures = [workers.submit(simulate, scenario) for _, scenario in variants]
        runs = []
        for done, future in enumerate(futures, start=1):
            runs.append(future.result())
            progress(done, len(futures))
    return [(name, run) for (name, _), run in zip(variants, runs, strict=True)]


def _variants(file: Path | None, flags: Mapping[str, str], choice: str) -> Sequence[tuple[str, Scenario]]:
    setting, _, values = choice.partition("=")
    known = {".".join(path) for path, _ in config.paths(Scenario)}
    if setting.strip() not in known or not values.strip():
        raise ConfigError(f'{choice!r}: write a setting and its values, "load=50%,80%,95%" or "variant=a,b"')
    named = [value.strip() for value in values.split(",")]
    return [(value, read(file, {**flags, setting.strip(): value})) for value in named]
