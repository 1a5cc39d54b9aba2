"""YAML whose mappings know their lines, so that errors can name them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import yaml


class Fault(ValueError):
    """What is wrong on a line of a file, counted from 1; 0: nobody knows which."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


class Lines(dict[Any, Any]):
    """A mapping of the file, and the line of each of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}


class _Loader(yaml.SafeLoader):
    """The safe one, with `Lines` for mappings."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Iterator[Lines]:
    read = Lines()
    yield read
    read.update(loader.construct_mapping(node))
    read.lines.update((str(key.value), key.start_mark.line + 1) for key, _ in node.value)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_yaml(text: str) -> Any:
    """What a YAML text holds.

    Raises:
        Fault: it is not YAML.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise Fault(line, f"not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # a character that may not be in YAML, a date that is none
        raise Fault(0, f"not YAML: {str(error).splitlines()[0]}") from error


def line_of(mapping: Any, *keys: str) -> int:
    """Return the line of the first of the keys that the mapping has, else of its first key; 0 where it has no lines."""
    lines: dict[str, int] = getattr(mapping, "lines", {})
    return next((lines[key] for key in keys if key in lines), min(lines.values(), default=0))


@contextlib.contextmanager
def on_line(line: int) -> Iterator[None]:
    """Has the errors of a block name the line, unless they name one already."""
    try:
        yield
    except Fault as fault:
        raise (fault if fault.line else Fault(line, str(fault))) from fault
    except ValueError as error:
        raise Fault(line, str(error)) from error
    except (TypeError, AttributeError) as error:  # a list where a record should be, a number where a list should be
        text = f"a field has another shape than in an EndpointPickerConfig: {error}"
        raise Fault(line, text) from error
