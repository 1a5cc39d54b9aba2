"""Green contexts: streams whose kernels stay on some of the GPU's multiprocessors (SMs), through the CUDA driver.

The driver splits the SMs in a fixed order: decode takes the group that a split returns, prefill the remainder of the
same split, so that two processes which make the same split get disjoint SMs. (torch.cuda.green_contexts.GreenContext
has no remainder, so two of them would overlap.) Needs CUDA 12.5 or later. Not run on a GPU.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from prfaas.colocate.processes.shared_memory import Side
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


class Streams(Protocol):
    """One side's; streams live as long as it does."""

    def of(self, share: float) -> torch.cuda.Stream: ...


class PlainStreams:
    """Every share is the whole device, or what MPS left of it; decode's kernels go first where both wait."""

    def __init__(self, side: Side) -> None:
        self._stream = torch.cuda.Stream(priority=-1 if side == "decode" else 0)

    def of(self, share: float) -> torch.cuda.Stream:
        return self._stream


class MaskedStreams:
    """A stream per share, made when it is first asked for; decode has the first units, prefill the last."""

    def __init__(self, side: Side, driver: Driver) -> None:
        self._side, self._driver = side, driver
        self._streams: dict[float, torch.cuda.Stream] = {}

    def of(self, share: float) -> torch.cuda.Stream:
        if share not in self._streams:
            self._streams[share] = self._make(share)
        return self._streams[share]

    def _make(self, share: float) -> torch.cuda.Stream:
        if share >= 1:
            return PlainStreams(self._side).of(share)
        decode_share = share if self._side == "decode" else 1 - share
        return torch.cuda.ExternalStream(self._driver.stream(self._side, decode_share))


def streams_of(partition: str, side: Side) -> Streams:
    """Return the streams of a side under a partition back end.

    Raises:
        ConfigError: the driver does not offer it.
    """
    torch.zeros(1, device="cuda")  # the primary context, in which every stream lives
    if partition == "green_contexts":
        return MaskedStreams(side, Driver(_library("libcuda.so.1", partition)))
    return PlainStreams(side)


def _library(name: str, partition: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise ConfigError(f"partition {partition}: {name} is not here") from error
