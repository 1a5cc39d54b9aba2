"""Shares as sets of cores, and the manager that chooses them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.colocate.cores import core_shares, move_threads, split, spread_threads, team_size
from prfaas.colocate.partition import PartitionManager, PartitionSettings
from prfaas.model.cost.colocation import OVERALLOCATED, Partition, ShareTable
from prfaas.scheduler.colocation import StepLoad
from tests.support.waiting import wait_until

CORES = (2, 3, 5, 7)
BUSY, DECODE_ALONE, PREFILL_ALONE = StepLoad(4, True), StepLoad(4, False), StepLoad(0, True)


@pytest.mark.parametrize("num_cores", [2, 3, 8])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.5, 0.75, 0.9])
def test_complementary_shares_take_disjoint_cores_and_leave_none_out(num_cores: int, share: float) -> None:
    cores = tuple(range(num_cores))
    decode, prefill = split(Partition(share, 1 - share), cores)
    assert decode and prefill and decode + prefill == cores


def test_overallocation_gives_both_sides_every_core() -> None:
    assert split(OVERALLOCATED, (4, 5)) == ((4, 5), (4, 5))


@pytest.mark.parametrize(("cores", "shares"), [(2, (0.5,)), (4, (0.25, 0.5, 0.75)), (1, ())])
def test_a_share_of_a_cpu_is_a_number_of_cores(cores: int, shares: tuple[float, ...]) -> None:
    assert core_shares(cores) == shares


@pytest.mark.parametrize(("cores", "threads"), [(1, 8), (4, 8), (8, 8), (3, 3), (7, 7)])
def test_the_team_of_prefill_stays_where_each_core_gets_equally_many_threads(cores: int, threads: int) -> None:
    assert team_size(cores, 8) == threads


def test_many_cores_are_measured_in_eight_steps_at_most() -> None:
    assert len(core_shares(128)) == 8


def test_without_a_profile_each_side_gets_half_while_both_run_and_all_cores_while_alone() -> None:
    manager = PartitionManager(PartitionSettings(), CORES)
    assert manager.next(BUSY) == ((2, 3), (5, 7))
    assert manager.next(DECODE_ALONE)[0] == CORES
    assert manager.next(PREFILL_ALONE)[1] == CORES


def test_a_profile_gives_decode_the_least_share_that_meets_its_slo() -> None:
    table = ShareTable((0.25, 0.5, 0.75), (4,), ((0.09, 0.04, 0.03),), (0.2,))
    manager = PartitionManager(PartitionSettings(itl_slo_seconds=0.035, table=table), CORES)
    assert manager.next(BUSY) == ((2, 3, 5), (7,))


def test_a_pinned_share_never_changes() -> None:
    manager = PartitionManager(PartitionSettings(decode_share=0.25), CORES)
    assert {manager.next(load) for load in (BUSY, DECODE_ALONE, PREFILL_ALONE)} == {((2,), (3, 5, 7))}


def test_decode_waits_between_steps_for_what_its_slo_leaves_while_prefill_runs_beside_it() -> None:
    table = ShareTable((0.5,), (4,), ((0.03,),), (float("inf"),))
    manager = PartitionManager(PartitionSettings(itl_slo_seconds=0.1, table=table), CORES)
    manager.next(BUSY)
    assert manager.pause_seconds(0.03, 0.01) == pytest.approx(0.04) and manager.pause_seconds(0.03, 0.048) == 0.0
    manager.next(DECODE_ALONE)
    assert manager.pause_seconds(0.03, 0.0) == 0.0


def test_decode_that_gains_nothing_from_all_cores_keeps_its_share_alone_and_does_not_wait() -> None:
    table = ShareTable((0.25,), (4,), ((0.03,),), (float("inf"),))
    manager = PartitionManager(PartitionSettings(itl_slo_seconds=0.1, table=table, decode_spreads=False), CORES)
    assert manager.next(DECODE_ALONE)[0] == (2,) and manager.pause_seconds(0.03, 0.0) == 0.0
    assert manager.next(PREFILL_ALONE)[1] == CORES


def test_decode_does_not_wait_without_a_profile_or_on_a_pinned_share() -> None:
    table = ShareTable((0.5,), (4,), ((0.03,),), (float("inf"),))
    for settings in (PartitionSettings(), PartitionSettings(decode_share=0.5, table=table)):
        manager = PartitionManager(settings, CORES)
        manager.next(BUSY)
        assert manager.pause_seconds(0.0, 0.0) == 0.0


def test_threads_move_in_the_middle_of_a_step_and_the_team_has_the_size_of_its_cores() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core cannot be shared")
    code = (
        "import os, torch; from prfaas.colocate.cores import all_cores, move_threads, resize_team; cores = all_cores();"
        "torch.ones(4000, 4000).sum(); move_threads(cores[:1]); resize_team(1);"
        "tasks = [int(name) for name in os.listdir('/proc/self/task')];"
        "assert {tuple(os.sched_getaffinity(task)) for task in tasks} == {cores[:1]};"
        "assert torch.get_num_threads() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


def _busy(process: int) -> list[int]:
    """Return the threads that have computed for a twentieth of a second."""
    fields = {
        int(thread.name): (thread / "stat").read_text().rpartition(")")[2].split()
        for thread in Path(f"/proc/{process}/task").iterdir()
    }
    return [thread for thread, field in fields.items() if int(field[11]) >= 5]


def test_busy_threads_of_another_process_get_a_core_each_and_go_back_together() -> None:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    code = (
        "import threading, time; print(flush=True);"
        "spin = lambda: [sum(range(10**6)) for _ in iter(int, 1)];"
        "idle = [threading.Thread(target=time.sleep, args=(600,), daemon=True).start() for _ in range(4)];"
        "threading.Thread(target=spin, daemon=True).start(); spin()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            wait_until(lambda: len(_busy(process.pid)) == 2, what="two busy threads")
            spread_threads(cores, process.pid)
            assert {tuple(os.sched_getaffinity(task)) for task in _busy(process.pid)} == {(core,) for core in cores[:2]}
            move_threads(cores[:1], process.pid)
            assert {tuple(os.sched_getaffinity(task)) for task in _busy(process.pid)} == {cores[:1]}
        finally:
            process.kill()
