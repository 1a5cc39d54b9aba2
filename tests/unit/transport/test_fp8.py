"""Precision of the cast to 8-bit floats, and chunks that it leaves alone."""

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

INFINITY, NAN = 0x7F80, 0x7FC1


def _floats(raw: bytes) -> Any:
    return (numpy.frombuffer(raw, "<u2").astype("u4") << 16).view("f4").astype("f8")


def _raw(values: list[int]) -> bytes:
    return numpy.array(values, "<u2").tobytes()


@given(st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=200))
def test_large_values_lose_a_sixteenth_at_most_and_small_values_a_trifle_of_the_largest(
    values: list[int],
) -> None:
    payload = fp8.cast(_raw(values))
    if payload is None:
        assert any(value & 0x7FFF >= 0x7F00 for value in values)
        return
    before, after = _floats(_raw(values)), _floats(fp8.restore(payload))
    assert len(payload) == len(values) + fp8.HEAD_BYTES
    largest = max(abs(before))
    error = abs(after - before)
    assert (error <= numpy.maximum(abs(before) / 16, largest / 130_000) + 1e-39).all()
    assert (numpy.signbit(after) == numpy.signbit(before)).all()


def test_values_that_fit_into_8_bits_are_restored_exactly() -> None:
    exact = _raw([0x0000, 0x8000, 0x3F80, 0xBF80, 0x4000, 0x3FF0, 0x3F90])  # The values 0, -0, 1, -1, 2, 1.875, 1.125.
    assert fp8.restore(fp8.cast(exact) or b"") == exact


@pytest.mark.parametrize("raw", [b"", b"x", _raw([0, INFINITY]), _raw([1, NAN]), _raw([0x7F00])])
def test_chunk_that_cannot_be_cast_is_left_alone(raw: bytes) -> None:
    assert fp8.cast(raw) is None


@pytest.mark.parametrize("payload", [b"", b"\x80", b"\xfe\x00", b"\xff\x00\x00"])
def test_malformed_payload_is_rejected(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        fp8.raw_bytes(payload)
    assert refused.value.reason == "lossy"


def test_casting_and_restoring_need_memory_for_three_chunks_at_most() -> None:
    raw = _raw([0x3F80] * (MAX_CHUNK_BYTES // fp8.VALUE_BYTES))
    fp8.restore(fp8.cast(raw) or b"")  # Creates the cached tables.
    tracemalloc.start()
    payload = fp8.cast(raw)
    assert payload is not None
    assert tracemalloc.get_traced_memory()[1] < 2 * MAX_CHUNK_BYTES
    tracemalloc.reset_peak()
    restored = fp8.restore(payload)
    assert tracemalloc.get_traced_memory()[1] < 3 * MAX_CHUNK_BYTES
    assert len(restored) == len(raw)
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("before", "after", "output"),
    [
        ("", "print('numpy' in sys.modules)", "True"),
        ("sys.modules['numpy'] = None", "", "lossy_fp8: needs numpy"),
    ],
    ids=["installed", "missing"],
)
def test_check_loads_numpy_or_names_the_missing_package(before: str, after: str, output: str) -> None:
    lines = ["import sys", before, "from prfaas.transport.codec import fp8", "fp8.check()", after]
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert output in ran.stdout + ran.stderr
