"""Inferred profiles: near the published times, through a measured point, refused where they cannot be."""

from dataclasses import astuple

import pytest

from benchmarks.solver.paper import TABLE_3_PROFILES, TABLE_3_TOKENS
from benchmarks.solver.roofline_fit import fit
from prfaas.errors import ConfigError
from prfaas.model.cost.roofline import BAND, PrefillConstants, prefill_curve, roofline
from prfaas.solve.files import catalog

H200, H20 = catalog.find_gpu("H200"), catalog.find_gpu("h20")
# Relative errors of the estimate at 1Ki, 8Ki, 32Ki and 128Ki tokens against PrfaaS Table 3, 8 H200.
ERRORS = {
    "Kimi-Linear-48B-A3B": (0.04, 0.13, 0.07, 0.03),
    "MiMo-V2-Flash": (-0.21, -0.07, -0.11, -0.19),
    "Qwen3.5-397B-A17B": (-0.12, 0.0, 0.07, 0.01),
    "Ring-2.5-1T": (0.22, 0.18, 0.08, -0.14),
    "MiniMax-M2.5": (-0.11, 0.04, 0.05, 0.0),
    "Qwen3-235B-A22B": (0.0, 0.10, 0.10, 0.02),
}


@pytest.mark.parametrize("model", ERRORS)
def test_errors_against_published_prefill_times_are_as_documented(model: str) -> None:
    size, published = catalog.find_model(model).size, catalog.find_profile(TABLE_3_PROFILES[model]).prefill
    assert size is not None
    estimate = prefill_curve(size, H200, 8)
    errors = [estimate(tokens) / published.seconds(tokens) - 1 for tokens in TABLE_3_TOKENS]
    assert errors == pytest.approx(ERRORS[model], abs=0.012)
    assert all(BAND[0] < 1 / (1 + error) < BAND[1] for error in errors)


def test_constants_are_those_of_the_fit_and_hold_for_models_left_out() -> None:
    constants = fit(ERRORS)
    assert astuple(constants) == pytest.approx(astuple(PrefillConstants()), rel=0.005)
    for model in ("MiMo-V2-Flash", "Ring-2.5-1T"):  # Those with the greatest errors.
        left_out = fit([name for name in ERRORS if name != model])
        size, published = catalog.find_model(model).size, catalog.find_profile(TABLE_3_PROFILES[model]).prefill
        assert size is not None
        estimate = prefill_curve(size, H200, 8, left_out)
        ratios = [published.seconds(tokens) / estimate(tokens) for tokens in TABLE_3_TOKENS]
        assert BAND[0] < min(ratios) < max(ratios) < BAND[1]


def test_prefill_goes_through_the_measured_point() -> None:
    model = catalog.find_model("Qwen3-Next")
    measured = roofline(model, H20, 8, measured=(32_000, 4.5)).prefill
    inferred = roofline(model, H20, 8).prefill
    assert measured.seconds(32_000) == pytest.approx(4.5)
    assert measured.seconds(8_000) / inferred.seconds(8_000) == pytest.approx(4.5 / inferred.seconds(32_000))


def test_attention_within_a_window_grows_linearly_beyond_it() -> None:
    curve = roofline(catalog.find_model("gpt-oss-120b"), H200, 8).prefill.fresh
    (knot,) = curve.knots
    assert knot == 128
    assert curve(knot - 1e-6) == pytest.approx(curve(knot + 1e-6))


def test_more_gpus_hold_more_kv_and_prefill_faster() -> None:
    model = catalog.find_model("Llama-3.1-70B")
    small, large = roofline(model, H20, 4), roofline(model, H20, 8)
    assert small.kv_memory_bytes is not None and large.kv_memory_bytes is not None
    assert large.kv_memory_bytes > 2 * small.kv_memory_bytes
    assert large.prefill.seconds(32_000) < small.prefill.seconds(32_000)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit 8 H20"):
        roofline(catalog.find_model("Ring-2.5-1T"), H20, 8)


def test_a_model_of_unknown_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="parameters are not known"):
        roofline(catalog.find_model("internal-1t-hybrid"), H200, 8)
