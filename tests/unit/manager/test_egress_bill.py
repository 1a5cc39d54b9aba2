import pytest

from prfaas.manager.dashboard.egress_bill import SLOT_SECONDS, EgressBill
from prfaas.model.cost.egress_price import EgressPrice, Period

MIDNIGHT = 20_000 * 86_400.0
PRICE = EgressPrice(0.05, (Period(22, 24, 0.02),))
RATE = {"east": 12.5e6}  # 45 GB an hour.


def test_day_is_charged_at_the_price_of_each_hour_and_ends_at_midnight() -> None:
    bill = EgressBill({"east": PRICE, "idle": PRICE})
    bill.add(MIDNIGHT + 21 * 3600, RATE)
    bill.add(MIDNIGHT + 21.5 * 3600, RATE)
    bill.add(MIDNIGHT + 22.5 * 3600, RATE)
    east, idle = bill.document()
    assert [east["per_hour"], east["today"]] == pytest.approx([0.9, 1.125 + 0.9])
    assert (east["since"], idle["today"]) == (MIDNIGHT + 21 * 3600, 0.0)
    bill.add(MIDNIGHT + 24 * 3600, RATE)
    assert bill.document()[0]["today"] == 0.0


def test_cost_per_hour_is_the_mean_of_about_a_minute() -> None:
    bill = EgressBill({"east": PRICE})
    bill.add(MIDNIGHT, {})
    bill.add(MIDNIGHT + 30, RATE)
    assert bill.document()[0]["per_hour"] == pytest.approx(2.25 / 2)


def test_commitments_count_at_the_95th_percentile_of_five_minutes() -> None:
    bill = EgressBill({"east": EgressPrice(0.0, per_gbps_month=730.0)})  # 1 an hour for each Gbit/s.
    bill.add(MIDNIGHT, {})
    for slot in range(40):
        bill.add(MIDNIGHT + (slot + 0.9) * SLOT_SECONDS, {"east": 9e9 if slot >= 38 else 125e6})
    (east,) = bill.document()
    assert east["per_hour"] == pytest.approx(1.0)
    assert east["today"] == pytest.approx(39.9 / 12)
