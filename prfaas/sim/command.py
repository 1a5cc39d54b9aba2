"""The same work on many inputs, on all cores, in order."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

from prfaas import config
from prfaas.errors import ConfigError
from prfaas.sim.replay_log import Recorder, read_records, replay
from prfaas.sim.run import SimulationRun, arrival_rate, prepare, simulate
from prfaas.sim.scenario import Scenario

Progress = Callable[[int, int], None]  # done, of how many
Input = TypeVar("Input")
Output = TypeVar("Output")


def on_all_cores(work: Callable[[Input], Output], inputs: Sequence[Input], progress: Progress) -> list[Output]:
    """`work` of each input, which is a function of a module: other processes do it."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(len(inputs), os.cpu_count() or 1)), mp_context=context) as workers:
        futures = [workers.submit(work, one) for one in inputs]
        outputs = []
        for done, future in enumerate(futures, start=1):
            outputs.append(future.result())
            progress(done, len(futures))
    return outputs


def read(file: Path | None, flags: Mapping[str, str], *, varied: str = "") -> Scenario:
    """Return the scenario of a file, the environment and the command line; `varied` is what several values are tried of.

    Raises:
        ConfigError: as `config.load` does.
    """
    return config.load(Scenario, component="sim", file=file, flags=flags, varied=varied)


def one(file: Path | None, flags: Mapping[str, str], record: Path | None = None) -> list[tuple[str, SimulationRun]]:
    """Return the scenario itself; its decisions go to `record`, one on each line."""
    scenario = read(file, flags)
    if record is None:
        return [(scenario.variant, simulate(scenario))]
    if scenario.fidelity != "instances":
        raise ConfigError("--record: stations take no decisions; write fidelity: instances")
    try:
        lines = record.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--record {record}: {error.strerror}; name a file in a folder that exists") from error
    with lines:
        return [(scenario.variant, simulate(scenario, watch=Recorder(lines)))]


def replay_file(path: Path) -> str:
    """What `scheduler.route` makes again of recorded decisions, in words.

    Raises:
        ConfigError: the file cannot be read, or a decision comes out otherwise; it says how many and the first.
    """
    records = read_records(path)
    differences = list(replay(records))
    if not differences:
        return f"{len(records)} decisions, each made again as recorded"
    first = differences[0]
    raise ConfigError(
        f"{path}: {len(differences)} of {len(records)} decisions differ; number {first.position} was {first.recorded}, "
        f"is {first.made}"
    )


def compare(file: Path | None, flags: Mapping[str, str], choice: str) -> list[tuple[str, SimulationRun]]:
    """Return a run for each value of "setting=a,b,c", all at the rate of the scenario without it, with the same seed."""
    variants = _variants(file, flags, choice)
    base = read(file, flags, varied=_varied(choice))
    rate = arrival_rate(base, prepare(base))
    return [(name, simulate(scenario, rate=rate)) for name, scenario in variants]


def sweep(
    file: Path | None, flags: Mapping[str, str], choice: str, progress: Progress
) -> list[tuple[str, SimulationRun]]:
    """Return a run for each value of "setting=a,b,c", each at its own load, on all cores."""
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
