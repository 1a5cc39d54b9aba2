"""Memory of one process that others map: a sealed-size memfd on the CPU, a CUDA IPC handle on a GPU.

The owner must outlive the users: a CUDA allocation goes with the process that made it. So the supervisor owns weights,
KV and states, and the two sides, either of which may die, only map them.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch

from prfaas.errors import RemoteProtocolError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class SharedTensor:
    """A flat tensor and how another process finds it; `fd` is a memfd of ours, or None on a GPU."""

    tensor: torch.Tensor
    fd: int | None

    def describe(self) -> dict[str, Any]:
        """Plain data for another process on this machine; a memfd itself goes beside it."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        plain = {"dtype": dtype, "num_elements": self.tensor.numel()}
        if self.fd is None:
            plain["cuda"] = list(self.tensor.untyped_storage()._share_cuda_())
        return plain


def allocate(num_elements: int, dtype: str, device: str) -> SharedTensor:
    """Return a new flat tensor of zeros."""
    if device != "cpu":
        return SharedTensor(torch.zeros(num_elements, dtype=DTYPES[dtype], device=device), None)
    fd = os.memfd_create("prfaas-colocate", os.MFD_CLOEXEC)
    os.ftruncate(fd, max(1, num_elements) * DTYPES[dtype].itemsize)
    return SharedTensor(_mapped(fd, num_elements, dtype), fd)


def attach(description: dict[str, Any], fd: int | None) -> torch.Tensor:
    """Return the tensor that another process described; closes `fd`.

    Raises:
        RemoteProtocolError: the description names a dtype that we do not know, or a memfd is missing.
    """
    dtype, num_elements = description.get("dtype"), description.get("num_elements")
    if dtype not in DTYPES or not isinstance(num_elements, int):
        raise RemoteProtocolError("malformed", f"not a tensor: dtype {dtype}, {num_elements} elements")
    if "cuda" in description:
        storage = torch.UntypedStorage._new_shared_cuda(*description["cuda"])
        return torch.empty(0, dtype=DTYPES[dtype], device=storage.device).set_(storage)[:num_elements]
    if fd is None:
        raise RemoteProtocolError("malformed", "a tensor in host memory came without its memfd")
    tensor = _mapped(fd, num_elements, dtype)
    os.close(fd)
    return tensor


def _mapped(fd: int, num_elements: int, dtype: str) -> torch.Tensor:
    # The tensor keeps the mapping alive.
    return torch.frombuffer(mmap.mmap(fd, 0), dtype=DTYPES[dtype], count=num_elements)
