"""Fitted law for the slowdown of decode tokens beside prefills on the same engine, as PPD's authors measured it.

No engine model explains it: one prompt of 1,024 tokens, some 60 ms of work, doubles the steps of 200 decoding requests for
seconds after it is done. So it stands apart from the twin's engines, which charge a prompt for its own work.
"""

from __future__ import annotations

from typing import Literal

PrefillKind = Literal["full", "append"]  # 1,024 new tokens, or 128 new ones behind about 2,048 cached

# All fitted by absolute error to the even tens of decoding requests, 20 to 200, with 0, 1, 2 and 4 prefills at once.
_STEP_BASE_SECONDS, _STEP_SECONDS_PER_REQUEST = 8.58e-3, 1.463e-4
_FULL_LIMIT, _FULL_GROWTH = 1.202, 0.150
_FULL_HALF_BATCH, _FULL_HALF_FALL = 50.0, 0.254
_APPEND, _APPEND_GROWTH = 0.0124, 0.537


def undisturbed_seconds(num_decoding: int) -> float:
    """TPOT of so many requests without prefills: a step has a fixed part and one for each request.

    The measured TPOT without prefills is itself uncertain by a tenth; every slowdown against it shares that error.
    """
    return _STEP_BASE_SECONDS + _STEP_SECONDS_PER_REQUEST * num_decoding


def slowdown_ratio(num_decoding: int, num_prefills: int, kind: PrefillKind) -> float:
    """By what part of itself TPOT grows: 1.0 is twice as long."""
    if not num_prefills:
        return 0.0
    if kind == "append":
        return float(_APPEND * num_prefills**_APPEND_GROWTH)
    limit = _FULL_LIMIT * num_prefills**_FULL_GROWTH
    half = _FULL_HALF_BATCH * num_prefills**-_FULL_HALF_FALL
    return float(limit * num_decoding**2 / (num_decoding**2 + half**2))
