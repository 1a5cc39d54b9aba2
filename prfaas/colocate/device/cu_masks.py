"""CU masking on AMD GPUs, as RAPID-Serve does it: a bit per compute unit on each command queue. Not run on a GPU."""

from __future__ import annotations

import ctypes

from prfaas.colocate.processes.sides import Side
from prfaas.errors import ConfigError

MASK_WORD_BITS = 32


def mask_words(side: Side, decode_share: float, num_units: int) -> list[int]:
    """Return the mask as 32-bit words, lowest unit first: decode has the first units, prefill all others, each at least one."""
    border = min(num_units - 1, max(1, round(decode_share * num_units)))
    whole, decode = (1 << num_units) - 1, (1 << border) - 1
    mask = decode if side == "decode" else whole & ~decode
    return [mask >> at & 0xFFFFFFFF for at in range(0, num_units, MASK_WORD_BITS)]


class Driver:
    """HIP's call for a stream with a mask."""

    def __init__(self, library: ctypes.CDLL, num_units: int) -> None:
        self._library, self._num_units = library, num_units

    def stream(self, side: Side, decode_share: float) -> int:
        """Return a stream's address. Raises ConfigError when HIP refuses."""
        words = mask_words(side, decode_share, self._num_units)
        stream = ctypes.c_void_p()
        mask = (ctypes.c_uint32 * len(words))(*words)
        status = self._library.hipExtStreamCreateWithCUMask(ctypes.byref(stream), ctypes.c_uint32(len(words)), mask)
        if status != 0:
            raise ConfigError(f"partition cu_masks: hipExtStreamCreateWithCUMask failed with HIP error {status}")
        return stream.value or 0
