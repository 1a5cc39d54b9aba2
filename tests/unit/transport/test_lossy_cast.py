"""What the cast to 8 bits keeps of every value, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import RemoteProtocolError
from prfaas.transport.codec import fp8
from prfaas.transport.protocol.wire import MAX_CHUNK_BYTES

INFINITY, NO_NUMBER = 0x7F80, 0x7FC1


def _floats(raw: bytes) -> Any:
    return (numpy.frombuffer(raw, "<u2").astype("u4") << 16).view("f4").astype("f8")


def _raw(values: list[int]) -> bytes:
    return numpy.array(values, "<u2").tobytes()


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=200))
def test_values_near_the_greatest_keep_fifteen_sixteenths_and_small_ones_err_by_a_trifle_of_it(
    values: list[int],
) -> None:
    payload = fp8.cast(_raw(values))
    if payload is None:
        assert any(value & 0x7FFF >= 0x7F00 for value in values), "too large, an infinity, or no number"
        return
    before, after = _floats(_raw(values)), _floats(fp8.restore(payload))
    assert len(payload) == len(values) + fp8.HEAD_BYTES
    greatest = max(abs(before))
    error = abs(after - before)
    assert (error <= numpy.maximum(abs(before) / 16, greatest / 130_000) + 1e-39).all()
    assert (numpy.signbit(after) == numpy.signbit(before)).all()


def test_what_eight_bits_can_hold_comes_back_as_it_was() -> None:
    exact = _raw([0x0000, 0x8000, 0x3F80, 0xBF80, 0x4000, 0x3FF0, 0x3F90])  # 0, -0, 1, -1, 2, 1.875, 1.125
    assert fp8.restore(fp8.cast(exact) or b"") == exact


@pytest.mark.parametrize("raw", [b"", b"x", _raw([0, INFINITY]), _raw([1, NO_NUMBER]), _raw([0x7F00])])
def test_what_cannot_be_cast_is_left_as_it_is(raw: bytes) -> None:
    assert fp8.cast(raw) is None


@pytest.mark.parametrize("payload", [b"", b"\x80", b"\xfe\x00", b"\xff\x00\x00"])
def test_a_payload_that_is_none_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        fp8.raw_bytes(payload)
    assert refused.value.reason == "lossy"


def test_a_chunk_takes_three_of_its_length_at_most_while_it_is_cast_or_restored() -> None:
    raw = _raw([0x3F80] * (MAX_CHUNK_BYTES // fp8.VALUE_BYTES))
    fp8.restore(fp8.cast(raw) or b"")  # makes the tables, which stay
    tracemalloc.start()
    payload = fp8.cast(raw)
    assert payload is not None
    assert tracemalloc.get_traced_memory()[1] < 2 * MAX_CHUNK_BYTES, "beyond what is cast"
    tracemalloc.reset_peak()
    restored = fp8.restore(payload)
    assert tracemalloc.get_traced_memory()[1] < 3 * MAX_CHUNK_BYTES, "with what came"
    assert len(restored) == len(raw)
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("", "print('numpy' in sys.modules)", "True"),
        ("sys.modules['numpy'] = None", "", "lossy_fp8: needs numpy"),
    ],
    ids=["there", "absent"],
)
def test_what_casts_need_is_loaded_with_the_settings_and_not_by_the_first_transfer(
    before: str, after: str, said: str
) -> None:
    lines = ["import sys", before, "from prfaas.transport.codec import fp8", "fp8.check()", after]
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert said in ran.stdout + ran.stderr
