"""Every kind of value: what is accepted, what is refused, and that writing is the inverse of reading."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas import units
from prfaas.units import KINDS


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("bytes", "4GiB", 4 << 30),
        ("bytes", "1.5 MB", 1_500_000),
        ("bytes", "4_096", 4096),
        ("seconds", "500ms", 0.5),
        ("seconds", "2m", 120.0),
        ("seconds", "0.25", 0.25),
        ("rate", "10Gbps", 1.25e9),
        ("rate", "1GB/s", 1e9),
        ("tokens", "32K", 32_000),
        ("tokens", "32Ki", 32_768),
        ("tokens", "19.4K", 19_400),
        ("ratio", "50%", 0.5),
        ("ratio", "1", 1.0),
        ("flag", "Yes", True),
        ("flag", "off", False),
        ("address", "[::1]:9000", "[::1]:9000"),
        ("text_list", "a, b,,c", ("a", "b", "c")),
    ],
)
def test_the_accepted_forms_are_read_in_base_units(kind: units.KindName, text: str, value: object) -> None:
    assert KINDS[kind].parse(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        ("bytes", "4 parsecs", "unit 'parsecs' is none of"),
        ("bytes", "0.3B", "not a whole number"),
        ("bytes", "-1", "not a number"),
        ("bytes", "4Gb", "unit 'Gb'"),
        ("seconds", "soon", "not a number"),
        ("rate", "10", "unit missing"),
        ("tokens", "1.5", "not a whole number"),
        ("count", "1GiB", "unit 'GiB'"),
        ("ratio", "101%", "above 1"),
        ("flag", "perhaps", "neither true nor false"),
        ("address", "9000", "not host:port"),
        ("address", "host:70000", "above 65535"),
        ("address", "host name:1", "not host:port"),
        ("text", "  ", "empty"),
    ],
)
def test_other_forms_are_refused_with_what_is_wrong(kind: units.KindName, text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        KINDS[kind].parse(text)


def test_an_address_splits_into_host_and_port_and_is_joined_of_them() -> None:
    for address, item in {"[fe80::1]:80": ("fe80::1", 80), "node-1.example:9000": ("node-1.example", 9000)}.items():
        assert units.split_address(address) == item and units.join_address(*item) == address


def test_a_choice_takes_its_words_only() -> None:
    role = units.choice("prefill", "decode")
    assert role.parse(" decode ") == "decode"
    with pytest.raises(ValueError, match="not one of the accepted words"):
        role.parse("both")


@pytest.mark.parametrize("kind", ["bytes", "tokens", "count"])
@given(value=st.integers(0, 1 << 80))
def test_whole_numbers_survive_showing_and_reading(kind: units.KindName, value: int) -> None:
    assert KINDS[kind].parse(KINDS[kind].show(value)) == value


@pytest.mark.parametrize("kind", ["seconds", "rate"])
@given(value=st.floats(0, 1e15, allow_subnormal=False))
def test_quantities_survive_showing_and_reading(kind: units.KindName, value: float) -> None:
    assert KINDS[kind].parse(KINDS[kind].show(value)) == value


@pytest.mark.parametrize("kind", list(KINDS))
@given(text=st.text(max_size=20))
def test_any_text_is_read_or_refused_with_a_value_error(kind: units.KindName, text: str) -> None:
    try:
        value = KINDS[kind].parse(text)
    except (ValueError, OverflowError):
        return
    assert KINDS[kind].parse(KINDS[kind].show(value)) == value
