import pytest

from prfaas.errors import ConfigError
from prfaas.model.cost.curve import cached_tokens
from prfaas.model.cost.lengths import expectation, mean_tokens
from prfaas.solve.files.traces import parse_spec


def test_the_bare_name_is_the_paper_s_trace() -> None:
    traffic = parse_spec("lognormal")
    assert mean_tokens(traffic.lengths) == pytest.approx(27_486, rel=1e-4)
    assert traffic.output.mean == 1024
    assert traffic.output.mean_context_tokens == pytest.approx(27_486 + 512, rel=1e-4)


def test_values_may_have_units() -> None:
    assert parse_spec("lognormal:min=1K,max=64Ki, output=2K").lengths.support == pytest.approx((1000, 65_536), rel=1e-3)


def test_hits_leave_the_rest_of_the_prompt() -> None:
    plain, hit = parse_spec("lognormal"), parse_spec("lognormal:hits=100%:75%")
    assert mean_tokens(hit.lengths) == pytest.approx(mean_tokens(plain.lengths) / 4)
    assert expectation(hit.lengths, cached_tokens) == pytest.approx(mean_tokens(plain.lengths) * 3 / 4)
    assert hit.output.mean_context_tokens == pytest.approx(plain.output.mean_context_tokens)


def test_some_requests_may_hit_and_others_not() -> None:
    mixed = parse_spec("lognormal:hits=40%:50%/20%:90%")
    assert mean_tokens(mixed.lengths) == pytest.approx(27_486 * (0.4 + 0.4 * 0.5 + 0.2 * 0.1), rel=1e-4)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("normal:mu=3", "neither a file nor"),
        ("lognormal:sig=1", "did you mean sigma"),
        ("lognormal:mu=nan", "finite"),
        ("lognormal:sigma=0", "sigma"),
        ("lognormal:min=5K,max=4K", "min must be below max"),
        ("lognormal:max=64KB", "KB"),
        ("lognormal:mu=90", "almost no length"),
        ("lognormal:hits=40%:100%", "hits"),
        ("lognormal:hits=80%:10%/40%:20%", "hits"),
    ],
)
def test_invalid_trace_descriptions_name_their_key(spec: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_spec(spec)
