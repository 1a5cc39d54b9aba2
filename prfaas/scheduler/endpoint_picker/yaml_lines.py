"""YAML loader that records the line of each key, so that errors can name it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import yaml


class YamlError(ValueError):
    """Error on a line of a file, counted from 1; 0 if the line is unknown."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


class MappingWithLines(dict[Any, Any]):
    """Mapping of a file, with the line of each key in `lines`."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}


class _Loader(yaml.SafeLoader):
    """Safe loader that builds `MappingWithLines`."""


def _build_mapping(loader: _Loader, node: yaml.MappingNode) -> Iterator[MappingWithLines]:
    mapping = MappingWithLines()
    yield mapping
    mapping.update(loader.construct_mapping(node))
    mapping.lines.update((str(key.value), key.start_mark.line + 1) for key, _ in node.value)


_Loader.add_constructor("tag:yaml.org,2002:map", _build_mapping)


def read_yaml(text: str) -> Any:
    """Return the content of a YAML text.

    Raises:
        YamlError: the text is not YAML.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise YamlError(line, f"not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # For example a forbidden character or an invalid date.
        raise YamlError(0, f"not YAML: {str(error).splitlines()[0]}") from error


def line_of(mapping: Any, *keys: str) -> int:
    """Return the line of the first of the keys that the mapping has, else of its first key; 0 if it has no lines."""
    lines: dict[str, int] = getattr(mapping, "lines", {})
    return next((lines[key] for key in keys if key in lines), min(lines.values(), default=0))


@contextlib.contextmanager
def on_line(line: int) -> Iterator[None]:
    """Make the errors of a block name the line, unless they name one already."""
    try:
        yield
    except YamlError as error:
        raise (error if error.line else YamlError(line, str(error))) from error
    except ValueError as error:
        raise YamlError(line, str(error)) from error
    except (TypeError, AttributeError) as error:  # A list or number in place of a record, or the reverse.
        raise YamlError(line, f"a field has another shape than in an EndpointPickerConfig: {error}") from error
