"""Tensors in shared memory (memfd). The supervisor owns them; the two sides, which may die, only map them."""

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
    """Flat tensor and the memfd behind it."""

    tensor: torch.Tensor
    fd: int

    def describe(self) -> dict[str, Any]:
        """Return plain data for another process, which also gets the memfd."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return {"dtype": dtype, "num_elements": self.tensor.numel()}


def allocate(num_elements: int, dtype: str) -> SharedTensor:
    """Return a new flat tensor of zeros."""
    fd = os.memfd_create("prfaas-colocate", os.MFD_CLOEXEC)
    os.ftruncate(fd, max(1, num_elements) * DTYPES[dtype].itemsize)
    return SharedTensor(_mapped(fd, num_elements, dtype), fd)


def attach(description: dict[str, Any], fd: int) -> torch.Tensor:
    """Return the tensor that another process described. Closes `fd`.

    Raises:
        RemoteProtocolError: the description is malformed or names an unknown dtype.
    """
    dtype, num_elements = description.get("dtype"), description.get("num_elements")
    if dtype not in DTYPES or not isinstance(num_elements, int):
        raise RemoteProtocolError("malformed", f"not a tensor: dtype {dtype}, {num_elements} elements")
    tensor = _mapped(fd, num_elements, dtype)
    os.close(fd)
    return tensor


def _mapped(fd: int, num_elements: int, dtype: str) -> torch.Tensor:
    # The tensor keeps the mapping alive.
    return torch.frombuffer(mmap.mmap(fd, 0), dtype=DTYPES[dtype], count=num_elements)
