"""Runs of `prfaas-sim`: one scenario, or one run per value of a setting."""

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
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


def compare(
    file: Path | None, flags: Mapping[str, str], choice: str, progress: Progress
) -> list[tuple[str, SimulationRun]]:
    """Return one run per value of "setting=a,b,c", on all cores.

    All runs have the seed and the arrival rate of the scenario without the setting, unless the setting is the load.
    """
    setting, _, values = (part.strip() for part in choice.partition("="))
    if setting not in {".".join(path) for path, _ in config.paths(Scenario)} or not values:
        raise ConfigError(f'{choice!r}: write a setting and its values, "load=50%,80%,95%" or "variant=a,b"')
    names = [value.strip() for value in values.split(",")]
    scenarios = [read(file, {**flags, setting: name}, varied=setting) for name in names]
    rate = None
    if setting != "load":
        base = read(file, flags, varied=setting)
        rate = arrival_rate(base, prepare(base))
    runs = on_all_cores(partial(simulate, rate=rate), scenarios, progress)
    return list(zip(names, runs, strict=True))
