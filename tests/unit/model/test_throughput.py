"""Equations (1) to (8) against the figures that the paper works out with them."""

import pytest

from benchmarks.solver import paper
from prfaas.model.capacity.loads import prfaas_throughput

GBIT = 1e9 / 8


def test_equation_1_gives_table_5() -> None:
    for mebibytes, seconds, printed in zip(
        paper.TABLE_5_KV_MIB, paper.TABLE_5_SECONDS, paper.TABLE_5_GBPS, strict=True
    ):
        assert paper.kv_throughput(mebibytes * 2**20, seconds) / GBIT == pytest.approx(printed, abs=0.03)


@pytest.mark.parametrize("model", paper.TABLE_3)
def test_equation_1_gives_table_3_from_geometry_and_prefill_times(model: str) -> None:
    for tokens, printed in zip(paper.TABLE_3_TOKENS, paper.TABLE_3[model], strict=True):
        assert paper.phi(model, tokens) / GBIT == pytest.approx(printed, rel=1e-3)


def test_equation_2_gives_the_fleet_sizes_of_section_2() -> None:
    claims = {claim.name: claim for claim in paper.sizing_claims()}
    for name, claim in claims.items():
        if name.endswith("below"):
            assert claim.computed < claim.printed
        else:
            assert claim.error == pytest.approx(0, abs=0.026), name
    assert len(claims) == 8


def test_equation_3_takes_the_lesser_of_computing_and_sending() -> None:
    assert prfaas_throughput(4, 2.0, egress_bytes_per_second=100, kv_bytes=10) == 2.0
    assert prfaas_throughput(4, 2.0, egress_bytes_per_second=5, kv_bytes=10) == 0.5
