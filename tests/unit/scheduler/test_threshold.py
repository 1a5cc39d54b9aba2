"""PrfaaS's rule for the prefill site, and abundant paths."""

import pytest

from prfaas.scheduler.threshold import PathCost, Supply, is_abundant, prefill_site


def _site(total: int, pd: int, prfaas: int, *, abundant: bool, t: int = 100) -> str:
    return prefill_site(
        total_tokens=total, pd_cached_tokens=pd, prfaas_cached_tokens=prfaas, threshold_tokens=t, abundant=abundant
    )


@pytest.mark.parametrize(
    ("total", "pd", "prfaas", "scarce", "abundant"),
    [
        (100, 0, 0, "pd", "pd"),
        (101, 0, 0, "prfaas", "prfaas"),
        (300, 200, 0, "pd", "pd"),
        (300, 199, 0, "prfaas", "prfaas"),
        (300, 0, 200, "prfaas", "prfaas_holds"),
        (300, 0, 199, "prfaas", "prfaas"),
        (300, 150, 200, "prfaas", "prfaas_holds"),
        (300, 200, 250, "pd", "pd"),
        (300, 250, 200, "pd", "pd"),
    ],
)
def test_rule_at_its_limits(total: int, pd: int, prfaas: int, scarce: str, abundant: str) -> None:
    assert _site(total, pd, prfaas, abundant=False) == scarce
    assert _site(total, pd, prfaas, abundant=True) == abundant


def test_transfer_pays_if_the_path_is_faster_than_computing() -> None:
    dense = PathCost(1.25e9, 0, 250e3, 0.05, 50e-6)  # 250 KB a token at 10 Gbit/s: 200 µs against 50 µs
    hybrid = PathCost(1.25e9, 200e6, 12e3, 0.05, 50e-6)  # 200 MB of state, 12 KB a token
    assert not dense.pays(10_000)
    assert hybrid.pays(10_000) and not hybrid.pays(100), "a state is worth its bytes from some length on"
    assert not PathCost(0, 1, 1, 1, 1).pays(10)


def test_path_becomes_abundant_above_the_headroom_and_stays_so_within_the_hysteresis() -> None:
    for rate, was, now in ((1.19, False, False), (1.21, False, True), (1.11, True, True), (1.09, True, False)):
        assert is_abundant(Supply(rate, 1.0), was_abundant=was) is now, rate
