"""Green contexts: streams whose kernels stay on some of the GPU's multiprocessors (SMs), through the CUDA driver.

The driver splits the SMs in a fixed order: decode takes the group that a split returns, prefill the remainder of the
same split, so that two processes which make the same split get disjoint SMs. (torch.cuda.green_contexts.GreenContext
has no remainder, so two of them would overlap.) Needs CUDA 12.5 or later. Not run on a GPU.
"""

from __future__ import annotations

import ctypes

from prfaas.colocate.processes.sides import Side
from prfaas.errors import ConfigError

# A CUdevResource is opaque here but for its count of SMs; the driver writes at most 144 bytes.
RESOURCE_BYTES = 512
SM_COUNT_AT = 96
RESOURCE_TYPE_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which cuGreenCtxCreate demands
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, which cuGreenCtxStreamCreate demands
GRANULE_SMS = 8  # Hopper gives out SMs in groups of 8; earlier ones accept that too
PRIORITY = {"decode": -1, "prefill": 0}


def num_decode_sms(share: float, num_sms: int) -> int:
    """SMs for decode's share, rounded up to what the hardware gives out; prefill keeps at least one group."""
    groups = max(1, -(-round(share * num_sms) // GRANULE_SMS))
    return min(groups * GRANULE_SMS, (num_sms - 1) // GRANULE_SMS * GRANULE_SMS)


class Driver:
    """The driver's calls on device 0. Green contexts live until the process ends."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def stream(self, side: Side, decode_share: float) -> int:
        """Return a stream's address on one side of the split at `decode_share`.

        Raises:
            ConfigError: the driver refuses.
        """
        device, whole = self._whole()
        group, rest = ctypes.create_string_buffer(RESOURCE_BYTES), ctypes.create_string_buffer(RESOURCE_BYTES)
        wanted = num_decode_sms(decode_share, _num_sms(whole))
        number = ctypes.c_uint(1)
        self._call(
            "cuDevSmResourceSplitByCount",
            group, ctypes.byref(number), whole, rest, ctypes.c_uint(0), ctypes.c_uint(wanted),
        )  # fmt: skip
        return self._stream_on(device, group if side == "decode" else rest, PRIORITY[side])

    def _whole(self) -> tuple[ctypes.c_int, ctypes.Array[ctypes.c_char]]:
        device, whole = ctypes.c_int(), ctypes.create_string_buffer(RESOURCE_BYTES)
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDeviceGetDevResource", device, whole, ctypes.c_int(RESOURCE_TYPE_SM))
        return device, whole

    def _stream_on(self, device: ctypes.c_int, sms: ctypes.Array[ctypes.c_char], priority: int) -> int:
        description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDevResourceGenerateDesc", ctypes.byref(description), sms, ctypes.c_uint(1))
        self._call("cuGreenCtxCreate", ctypes.byref(context), description, device, ctypes.c_uint(DEFAULT_STREAM))
        self._call(
            "cuGreenCtxStreamCreate",
            ctypes.byref(stream), context, ctypes.c_uint(NON_BLOCKING), ctypes.c_int(priority),
        )  # fmt: skip
        return stream.value or 0

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise ConfigError(f"partition green_contexts: the driver has no {name}; CUDA 12.5 or later has")
        status = function(*arguments)
        if status != 0:
            raise ConfigError(f"partition green_contexts: {name} failed with CUDA error {status}")


def _num_sms(resource: ctypes.Array[ctypes.c_char]) -> int:
    return int.from_bytes(resource.raw[SM_COUNT_AT : SM_COUNT_AT + 4], "little")
