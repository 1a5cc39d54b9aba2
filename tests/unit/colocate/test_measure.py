"""Shares of a CPU as numbers of cores."""

import os

import pytest

from prfaas.colocate.profile.measure import core_shares


@pytest.mark.parametrize(("cores", "shares"), [(2, (0.5,)), (4, (0.25, 0.5, 0.75)), (1, ())])
def test_a_share_of_a_cpu_is_a_number_of_cores(cores: int, shares: tuple[float, ...]) -> None:
    assert core_shares(cores) == shares


def test_many_cores_are_measured_in_eight_steps_at_most() -> None:
    assert len(core_shares(os.cpu_count() or 1)) <= 8
    assert len(core_shares(128)) == 8
