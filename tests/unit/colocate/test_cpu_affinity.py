"""Shares as sets of cores."""

import os
import subprocess
import sys

import pytest

from prfaas.colocate.device.cpu import cores_of


@pytest.mark.parametrize("num_cores", [2, 3, 8])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.5, 0.75, 0.9])
def test_complementary_shares_take_disjoint_cores_and_leave_none_out(num_cores: int, share: float) -> None:
    cores = list(range(num_cores))
    decode, prefill = cores_of("decode", share, cores), cores_of("prefill", 1 - share, cores)
    assert decode and prefill and decode + prefill == cores


def test_overallocation_gives_both_sides_every_core() -> None:
    assert cores_of("decode", 1.0, [4, 5]) == cores_of("prefill", 1.0, [4, 5]) == [4, 5]


def test_a_share_moves_the_threads_of_the_process_and_keeps_their_limit() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core cannot be shared")
    code = (
        "import os, torch; from prfaas.colocate.device.cpu import CpuSets; sets = CpuSets('decode', 1);"
        "every = len(os.sched_getaffinity(0)); sets.take(0.5); assert len(os.sched_getaffinity(0)) < every;"
        "sets.take(1.0); assert len(os.sched_getaffinity(0)) == every and torch.get_num_threads() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)
