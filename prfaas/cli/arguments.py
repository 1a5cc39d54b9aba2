"""Arguments and errors of commands that take flags instead of settings."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from prfaas.errors import ConfigError, MissingExtraError
from prfaas.units import KINDS, KindName

T = TypeVar("T")


class OneLineParser(argparse.ArgumentParser):
    """Parser that reports an error without the usage text and exits with 2."""

    def error(self, message: str) -> NoReturn:
        """End the process with the error on one line."""
        self.exit(2, f"{self.prog}: {message}\n")


def run(prog: str, work: Callable[[], int]) -> int:
    """Return the status of `work`; 2, with the error on one line, when an input cannot be used or an extra is missing."""
    try:
        return work()
    except (ConfigError, MissingExtraError, OSError) as error:
        sys.stderr.write(f"{prog}: {' '.join(str(error).split())}\n")
        return 2


def value_of(name: KindName, *, least: int | None = None, most: int | None = None) -> Callable[[str], Any]:
    """Return an argparse type for values of this form within bounds."""
    limits = {"at least": least, "at most": most}
    accepted = ", ".join(
        [KINDS[name].accepted, *(f"{word} {limit}" for word, limit in limits.items() if limit is not None)]
    )

    def read(text: str) -> Any:
        try:
            value = KINDS[name].parse(text)
            if least is not None and value < least:
                raise ValueError("too small")
            if most is not None and value > most:
                raise ValueError("too large")
            return value
        except (ValueError, OverflowError) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}; accepted: {accepted}") from error

    return read


def show_progress(done: int, total: int, text: str = "") -> None:
    """Show a progress bar on a terminal."""
    if sys.stderr.isatty():
        filled = 30 * done // total
        sys.stderr.write(
            f"\r\033[K[{'#' * filled}{'.' * (30 - filled)}] {done}/{total} {text}" + ("\n" if done == total else "")
        )
        sys.stderr.flush()


def list_of(read_item: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return an argparse type for a comma-separated list of at least one item."""

    def read(text: str) -> tuple[T, ...]:
        items = tuple(read_item(item.strip()) for item in text.split(",") if item.strip())
        if not items:
            raise argparse.ArgumentTypeError(f"{text!r}: at least one value")
        return items

    return read
