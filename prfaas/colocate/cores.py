"""Division of a machine's cores between the two workers: affinity of all threads, and the size of the OpenMP team."""

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

from prfaas.model.cost.colocation import Partition

Cores = tuple[int, ...]


def all_cores() -> Cores:
    """Return the cores that this process may use, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


def split(partition: Partition, cores: Cores) -> tuple[Cores, Cores]:
    """Return the cores of decode and of prefill.

    Decode's share is rounded up. Shares that add up to one give disjoint sets wherever there are two cores. An idle side
    keeps what its first step needs: all cores.
    """
    if not partition.is_split or len(cores) == 1:
        return cores, cores
    border = min(len(cores) - 1, max(1, math.ceil(partition.decode_share * len(cores) - 1e-9)))
    return cores[:border], cores[border:]


def core_shares(num_cores: int) -> tuple[float, ...]:
    """Return the shares that cores allow: every split that leaves each side one, at most eight of them."""
    return tuple(round(count / num_cores, 4) for count in range(1, num_cores, -(-num_cores // 8)))


def move_threads(cores: Sequence[int], process: int | str = "self") -> None:
    """Move all threads of a process to `cores`, at once, even in the middle of a step."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:
            continue  # The thread ended meanwhile.


def spread_threads(cores: Sequence[int], process: int) -> None:
    """Give each busy thread of a process a core, the busiest first. The kernel would leave threads that shared one there."""
    threads = sorted(Path(f"/proc/{process}/task").iterdir(), key=_busy_nanoseconds, reverse=True)
    for thread, core in zip(threads, itertools.cycle(cores), strict=False):
        os.sched_setaffinity(int(thread.name), (core,))


def _busy_nanoseconds(thread: Path) -> int:
    return int((thread / "schedstat").read_text().split()[0])


def team_size(num_cores: int, num_all: int) -> int:
    """Return the threads of prefill on some of the cores: one for each core of all if every core gets equally many.

    Such a team stays when the cores change, which happens in the middle of steps. Its threads wait without spinning.
    """
    return num_cores if num_all % num_cores else num_all


def resize_team(num_threads: int) -> None:
    """Set the number of OpenMP threads of the calling thread, from the next parallel region on."""
    import torch  # noqa: PLC0415 (the supervisor imports this module too, and shall not hold torch in memory)

    torch._C.set_num_threads(num_threads)  # vLLM has replaced `torch.set_num_threads` by nothing.
