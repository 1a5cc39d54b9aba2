"""The same work on many inputs, on all cores, in order."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

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
