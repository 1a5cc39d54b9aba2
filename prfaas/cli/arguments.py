"""An argument parser that refuses in one line, for commands whose input is a description rather than settings."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with the command line without repeating its usage, and exits with 2."""

    def error(self, message: str) -> NoReturn:
        """End the process."""
        self.exit(2, f"{self.prog}: {message}\n")
