"""Argument parser with one-line errors, for commands that take a description instead of settings."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Parser that reports an error without the usage text and exits with 2."""

    def error(self, message: str) -> NoReturn:
        """End the process with the error on one line."""
        self.exit(2, f"{self.prog}: {message}\n")
