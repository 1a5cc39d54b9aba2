"""Loads the part of a command that needs an optional extra, or says which extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Literal

from prfaas.errors import MissingExtraError

Extra = Literal[
    "manager", "router", "gateway", "vllm", "vllm-cpu", "colocate", "console", "solve", "plot", "tracing", "dev"
]


def load(module: str, *, extra: Extra) -> ModuleType:
    """Return the module `module` of this package, whose foreign imports come with `extra`.

    Raises:
        MissingExtraError: one of them is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "prfaas").split(".")[0]
        if package == "prfaas":
            raise
        raise MissingExtraError(f"{package} is not installed; run: pip install 'prfaas[{extra}]'") from error
