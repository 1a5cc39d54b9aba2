"""Lossy cast of attention values from bfloat16 to 8-bit floats, used only if the settings of both ends allow it (pure).

An 8-bit float has a sign, 4 exponent bits and 3 mantissa bits (E4M3 without infinities). A chunk's values are first divided
by a power of two, so that the largest lies between 128 and 256. Values down to 1/8000 of the largest lose at most 1/16 of
themselves. Smaller values lose at most 1/130000 of the largest. A chunk with an infinity or NaN travels exactly.

Payload of a LOSSY frame: biased bfloat16 exponent of the largest value (1), then one byte per value.
"""

from __future__ import annotations

import importlib
from functools import cache, lru_cache
from typing import Any

from prfaas.errors import ConfigError, RemoteProtocolError

LOSSY_FP8 = "lossy_fp8"  # Capability that both ends must name.
DTYPE = "bfloat16"
VALUE_BYTES, HEAD_BYTES = 2, 1
_EXPONENT_MASK, _EXPONENT_AT, _EXPONENT_BIAS = 0x7F80, 7, 127
_LEAST_EXPONENT = -6  # Of an 8-bit float.
_TOP_EXPONENT = 7  # The largest value is scaled to this exponent.
_MANTISSA = 8  # Steps between powers of two.
_MAX_EXPONENT = 254  # Biased exponents from here on are too large to cast, infinite or NaN.


@cache
def _numpy() -> Any:
    """Import numpy on first use, because it takes a third of a command's start time."""
    return importlib.import_module("numpy")


def check() -> None:
    """Load numpy before the first transfer.

    Raises:
        ConfigError: numpy is not installed.
    """
    try:
        _numpy()
    except ImportError as error:
        raise ConfigError("lossy_fp8: needs numpy (pip install 'prfaas[lossy]')") from error


def cast(raw: bytes) -> bytes | None:
    """Return the payload of a LOSSY frame, or None if these bytes must travel exactly."""
    if len(raw) % VALUE_BYTES or not raw:
        return None
    values = _numpy().frombuffer(raw, dtype="<u2")
    top = int((values & _EXPONENT_MASK).max()) >> _EXPONENT_AT
    if top >= _MAX_EXPONENT:
        return None
    return bytes((top,)) + bytes(_codes(top)[values].data)


def raw_bytes(payload: bytes | bytearray) -> int:
    """Return the number of bytes that a LOSSY payload expands to.

    Raises:
        RemoteProtocolError: the payload is malformed.
    """
    if len(payload) <= HEAD_BYTES or payload[0] >= _MAX_EXPONENT:
        raise RemoteProtocolError("lossy", f"a lossy chunk of {len(payload)} bytes that begins with {payload[:1]!r}")
    return (len(payload) - HEAD_BYTES) * VALUE_BYTES


def restore(payload: bytes | bytearray) -> bytes:
    """Return the values as bfloat16. The payload must come from `cast`, or have passed `raw_bytes`."""
    codes = _numpy().frombuffer(payload, dtype="u1", offset=HEAD_BYTES)
    restored: bytes = _values(payload[0])[codes].tobytes()
    return restored


def _scale(top: int) -> int:
    """Return the power of two by which values are divided."""
    return max(top, 1) - _EXPONENT_BIAS - _TOP_EXPONENT


@lru_cache(maxsize=64)
def _codes(top: int) -> Any:
    """Return the nearest 8-bit float of every 16-bit value, with ties to even, as a table of 64 KiB."""
    numpy = _numpy()
    bits = numpy.arange(1 << 16, dtype="u4")
    # Values above the largest do not occur in the chunk, so their overflow does not matter.
    with numpy.errstate(invalid="ignore", over="ignore"):
        magnitudes = numpy.ldexp((bits << 16 & 0x7FFFFFFF).view("f4").astype("f8"), -_scale(top))
        _, exponents = numpy.frexp(magnitudes)
        exponents = numpy.where(magnitudes, numpy.maximum(exponents - 1, _LEAST_EXPONENT), _LEAST_EXPONENT)
        steps = numpy.rint(numpy.ldexp(magnitudes, 3 - exponents))
        codes = numpy.clip((exponents - _LEAST_EXPONENT) * _MANTISSA + steps, 0, 0x7E)
    return numpy.nan_to_num(codes).astype("u1") | (bits >> 8 & 0x80).astype("u1")


@lru_cache(maxsize=64)
def _values(top: int) -> Any:
    """Return the 16-bit value of every 8-bit float as a table."""
    numpy = _numpy()
    codes = numpy.arange(256, dtype="i4")
    fields, steps = codes >> 3 & 0xF, codes & 7
    exponents = numpy.maximum(fields, 1) - 1 + _LEAST_EXPONENT
    magnitudes = numpy.ldexp((steps + _MANTISSA * (fields > 0)).astype("f8"), exponents - 3 + _scale(top))
    bits = (magnitudes.astype("f4").view("u4") >> 16).astype("u2")
    return (bits | (codes << 8 & 0x8000).astype("u2")).astype("<u2")
