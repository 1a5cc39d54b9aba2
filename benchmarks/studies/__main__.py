"""`make bench AREA=studies ARGS="rapid"`: run one study in the twin and print the tables."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from benchmarks.studies import study_plots
from benchmarks.studies.studies import STUDIES, ppd_figures_of, shown
from prfaas.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies", description=__doc__)
    parser.add_argument("study", choices=tuple(STUDIES))
    parser.add_argument("--conversations", type=Path, metavar="FILE", help="recorded conversations for ppd-figures")
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write the study's plots as SVG")
    flags = parser.parse_args()
    if flags.conversations and flags.study != "ppd-figures":
        parser.error("--conversations: only ppd-figures takes conversations")
    study = STUDIES[flags.study]
    try:
        if flags.conversations:
            study = ppd_figures_of(flags.conversations)
        tables = study(partial(_show_progress, flags.study))
    except ConfigError as error:
        parser.error(str(error))
    print(json.dumps([table.to_dict() for table in tables], indent=2) if flags.json else shown(tables))
    if flags.plot:
        flags.plot.mkdir(parents=True, exist_ok=True)
        for file in study_plots.write(flags.study, tables, flags.plot):
            sys.stderr.write(f"{file}\n")
    return 0


def _show_progress(name: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{name}: {done}/{total}" + ("\n" if done == total else ""))


if __name__ == "__main__":
    sys.exit(main())
