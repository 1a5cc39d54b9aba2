"""Output of answers: tables on a terminal, JSON for programs."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prfaas.console.tables import Mood, Table

_STYLES: dict[Mood, str] = {"plain": "", "good": "green", "warning": "yellow", "bad": "bold red"}


@dataclass(frozen=True)
class CommandOutput:
    """Answer of a command as JSON document and as tables, with the exit status."""

    document: Any
    tables: Sequence[Table] = field(default=())
    status: int = 0


def show(answer: CommandOutput, *, as_json: bool) -> None:
    """Write an answer to standard output: tables on a terminal, JSON otherwise or on request."""
    if as_json or not sys.stdout.isatty():
        sys.stdout.write(json.dumps(answer.document, indent=2) + "\n")
        return
    for table in answer.tables:
        show_table(table)


def show_table(table: Table) -> None:
    """Write one table: coloured and fitted with rich, plain without rich."""
    try:
        import rich.box  # noqa: PLC0415  # Part of the extra `console`.
        import rich.console  # noqa: PLC0415
        import rich.table  # noqa: PLC0415
    except ModuleNotFoundError:
        sys.stdout.write(plain_text(table))
        return
    console = rich.console.Console(markup=False, highlight=False)
    shown = rich.table.Table(title=table.title, title_justify="left", header_style="bold")
    if _fits_without_lines_alone(table, console.width):
        shown.box, shown.padding, shown.show_edge = rich.box.SIMPLE_HEAD, (0, 0, 0, 0), False
    for column in table.columns:
        shown.add_column(column, overflow="fold")
    for index, row in enumerate(table.rows):
        shown.add_row(*row, style=_STYLES[table.moods[index]] if table.moods else "")
    console.print(shown)
    for note in table.notes:
        console.print(note, soft_wrap=True)


def _fits_without_lines_alone(table: Table, width: int) -> bool:
    """Return whether a table fits with blanks between columns but not with lines."""
    num, cells = len(table.columns), sum(_widths(table))
    return cells + num - 1 <= width < cells + 3 * num + 1


def _widths(table: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]


def plain_text(table: Table) -> str:
    """Return the table as text with aligned columns."""
    lines = [table.columns, *table.rows]
    widths = _widths(table)
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([table.title, *text, *table.notes, "", ""])
