"""Settings that a component reads from a container's environment."""

import re
from collections.abc import Mapping
from typing import Any

from prfaas import config
from tools.reference_tables import COMPONENTS


def component_of(command: list[str]) -> str | None:
    """Return the component that a command starts; None where it is none of ours."""
    name = command[0].removeprefix("prfaas-") if command else ""
    return name if name in COMPONENTS and command[0] != name else None


def settings_of(component: str, environment: Mapping[str, str]) -> Any:
    """Raises ConfigError for a value that is refused, AssertionError for a variable that no setting reads."""
    own = {name: value for name, value in environment.items() if name.startswith(f"PRFAAS_{component.upper()}_")}
    known = {config.variable(component, path) for path, _ in config.paths(COMPONENTS[component])}
    assert set(own) <= known, set(own) - known
    return config.load(COMPONENTS[component], component=component, file=None, environment=own)


def rendered(text: str, **variables: str) -> str:
    """Return a compose file's text with these variables, and the defaults of the others."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1], match[2]), text)
