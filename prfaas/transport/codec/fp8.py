"""Attention's bfloat16 values cast to 8-bit floats for the wire: LOSSY, and only where both ends' settings ask for it (pure).

An 8-bit float has a sign, 4 bits of exponent and 3 of mantissa (E4M3 without infinities). A chunk's values are first divided
by a power of two, so that its greatest lies between 128 and 256: of any value down to an 8 000th of the greatest at most a
sixteenth is lost, of smaller ones at most a 130 000th of the greatest. A chunk with an infinity or no number travels exactly.

    biased exponent (8 bits, of bfloat16) of the greatest value 1, one byte for each value
"""

from __future__ import annotations

import importlib
from functools import cache, lru_cache
from typing import Any

from prfaas.errors import ConfigError, RemoteProtocolError

LOSSY_FP8 = "lossy_fp8"  # the capability; both ends must name it
DTYPE = "bfloat16"  # the only one that is known
VALUE_BYTES, HEAD_BYTES = 2, 1
_EXPONENT_MASK, _EXPONENT_AT, _EXPONENT_BIAS = 0x7F80, 7, 127
_LEAST_EXPONENT, _TOP_EXPONENT, _MANTISSA = (
    -6,
    7,
    8,
)  # of an 8-bit float; where the greatest value goes; steps between powers
_NO_NUMBER = 254  # a biased exponent from here on is too large to be cast, an infinity, or no number


@cache
def _numpy() -> Any:
    """Loaded where casts are asked for: it takes a third of the time that a command needs to start."""
    return importlib.import_module("numpy")


def check() -> None:
    """Have it loaded before the first transfer waits for it; raise ConfigError where this host cannot cast."""
    try:
        _numpy()
    except ImportError as error:
        raise ConfigError("lossy_fp8: needs numpy (pip install 'prfaas[lossy]')") from error


def cast(raw: bytes) -> bytes | None:
    """The payload of a LOSSY frame; None: these bytes must travel as they are."""
    if len(raw) % VALUE_BYTES or not raw:
        return None
    values = _numpy().frombuffer(raw, dtype="<u2")
    top = int((values & _EXPONENT_MASK).max()) >> _EXPONENT_AT
    if top >= _NO_NUMBER:
        return None
    return bytes((top,)) + bytes(_codes(top)[values].data)


def raw_bytes(payload: bytes | bytearray) -> int:
    """How many bytes a LOSSY payload stands for.

    Raises:
        RemoteProtocolError: it is none.
    """
    if len(payload) <= HEAD_BYTES or payload[0] >= _NO_NUMBER:
        raise RemoteProtocolError("lossy", f"a lossy chunk of {len(payload)} bytes that begins with {payload[:1]!r}")
    return (len(payload) - HEAD_BYTES) * VALUE_BYTES


def restore(payload: bytes | bytearray) -> bytes:
    """The values that the receiver keeps, as bfloat16; `payload` has gone through `raw_bytes`, or come from `cast`."""
    codes = _numpy().frombuffer(payload, dtype="u1", offset=HEAD_BYTES)
    restored: bytes = _values(payload[0])[codes].tobytes()
    return restored


def _scale(top: int) -> int:
    """Values are divided by 2 to this power."""
    return max(top, 1) - _EXPONENT_BIAS - _TOP_EXPONENT


@lru_cache(maxsize=64)
def _codes(top: int) -> Any:
    """Of every 16-bit value its 8-bit float, rounded to the nearest, ties to even: 64 KiB."""
    numpy = _numpy()
    bits = numpy.arange(1 << 16, dtype="u4")
    with numpy.errstate(invalid="ignore", over="ignore"):  # of values beyond the greatest, which do not occur
        magnitudes = numpy.ldexp((bits << 16 & 0x7FFFFFFF).view("f4").astype("f8"), -_scale(top))
        _, exponents = numpy.frexp(magnitudes)
        exponents = numpy.where(magnitudes, numpy.maximum(exponents - 1, _LEAST_EXPONENT), _LEAST_EXPONENT)
        steps = numpy.rint(numpy.ldexp(magnitudes, 3 - exponents))
        codes = numpy.clip((exponents - _LEAST_EXPONENT) * _MANTISSA + steps, 0, 0x7E)
    return numpy.nan_to_num(codes).astype("u1") | (bits >> 8 & 0x80).astype("u1")


@lru_cache(maxsize=64)
def _values(top: int) -> Any:
    """Of every 8-bit float its 16-bit value."""
    numpy = _numpy()
    codes = numpy.arange(256, dtype="i4")
    fields, steps = codes >> 3 & 0xF, codes & 7
    exponents = numpy.maximum(fields, 1) - 1 + _LEAST_EXPONENT
    magnitudes = numpy.ldexp((steps + _MANTISSA * (fields > 0)).astype("f8"), exponents - 3 + _scale(top))
    bits = (magnitudes.astype("f4").view("u4") >> 16).astype("u2")
    return (bits | (codes << 8 & 0x8000).astype("u2")).astype("<u2")
