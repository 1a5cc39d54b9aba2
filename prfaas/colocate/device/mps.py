"""Shares by NVIDIA's Multi-Process Service: fixed for the life of a process, set before it makes its CUDA context.

MPS also is what lets kernels of two processes run at the same time at all: without it the GPU switches between them
in time slices. Not run on a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

from prfaas.colocate.processes.sides import Side
from prfaas.errors import ConfigError

DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"


def environment(side: Side, decode_share: float) -> dict[str, str]:
    """Return the variables under which a side starts; 1.0 leaves both sides everything.

    Raises:
        ConfigError: no MPS daemon runs here.
    """
    directory = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_PIPE_DIRECTORY))
    if not (directory / "control").exists():
        raise ConfigError(f"partition mps: no MPS daemon at {directory}; start one: nvidia-cuda-mps-control -d")
    share = decode_share if side == "decode" or decode_share >= 1 else 1 - decode_share
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(round(share * 100))}
