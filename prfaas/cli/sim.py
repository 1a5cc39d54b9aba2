"""`prfaas-sim`: simulates a deployment under given traffic with the production scheduler functions."""

import argparse
import json
import sys
from collections.abc import Sequence

import prfaas
from prfaas import config
from prfaas.cli import startup
from prfaas.cli.arguments import OneLineParser, run, show_progress
from prfaas.errors import MissingExtraError


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and report. Return 2 when an input cannot be used or an extra is missing."""
    return run("prfaas-sim", lambda: _simulate(argv))


def _simulate(argv: Sequence[str] | None) -> int:
    try:
        scenario = startup.load_extra("prfaas.sim.scenario", extra="site").Scenario
    except MissingExtraError:
        _parser(None).parse_known_args(argv)  # Answers --help and --version.
        raise
    return _run(_parser(scenario).parse_args(argv))


def _parser(scenario: type[object] | None) -> argparse.ArgumentParser:
    """Return the parser. Without a scenario's class it lacks the flags of settings."""
    parser = OneLineParser(prog="prfaas-sim", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {prfaas.__version__}")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each run, in a list")
    parser.add_argument(
        "--compare",
        metavar="SETTING=A,B",
        help="one run per value, on all cores: load=50%%,80%%, or with the same arrivals variant=a,b",
    )
    if scenario is None:
        parser.epilog = "The flags of settings need: pip install 'prfaas[site]'"
    else:
        config.add_flags(parser, scenario)
    return parser


def _run(flags: argparse.Namespace) -> int:
    command = startup.load_extra("prfaas.sim.command", extra="site")
    report = startup.load_extra("prfaas.sim.report", extra="site")
    given = config.given_flags(flags)
    if flags.compare:
        runs = command.compare(flags.config, given, flags.compare, show_progress)
    else:
        runs = command.run_one(flags.config, given)
    if flags.json:
        listed = [report.to_json(name, run) for name, run in runs]
        print(json.dumps(listed, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(report.render(runs), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
