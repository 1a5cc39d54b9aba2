"""Start of a component: reads settings, sets up logs, reports what stops the start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from prfaas import config, logs
from prfaas.cli import named_files
from prfaas.errors import ConfigError, MissingExtraError

T = TypeVar("T")


def run(
    component: str, cls: type[T], argv: Sequence[str] | None, *, doc: str | None, start: Callable[[T], None]
) -> int:
    """Parse settings and call `start`, which serves until SIGTERM or SIGINT. Return 2 if it cannot start."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = config.parse(cls, component=component, argv=arguments, doc=doc or "", check=named_files.check)
    logs.setup(component)
    try:
        start(settings)
    except (ConfigError, MissingExtraError) as error:
        sys.stderr.write(f"prfaas-{component}: {error}\n")
        return 2
    return 0
