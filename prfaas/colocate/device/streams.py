"""Which CUDA stream a side launches on for a share of the device: plain, green-context or CU-masked ones.

Two processes run at the same time on one NVIDIA GPU only as clients of MPS; without it their kernels take turns.
None of this has run on a GPU.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from prfaas.colocate.device import cu_masks, green_contexts
from prfaas.colocate.processes.sides import Side
from prfaas.errors import ConfigError


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

    def __init__(self, side: Side, driver: green_contexts.Driver | cu_masks.Driver) -> None:
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
        return MaskedStreams(side, green_contexts.Driver(_library("libcuda.so.1", partition)))
    if partition == "cu_masks":
        return MaskedStreams(side, cu_masks.Driver(_library("libamdhip64.so", partition), _num_units()))
    return PlainStreams(side)


def _num_units() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def _library(name: str, partition: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise ConfigError(f"partition {partition}: {name} is not here") from error
