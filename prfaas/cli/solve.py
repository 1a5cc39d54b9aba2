"""`prfaas-solve`: plans threshold, split, throughput, latency, egress and cost, and the next purchase."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import prfaas
from prfaas.cli import startup
from prfaas.cli.arguments import OneLineParser, run


def main(argv: Sequence[str] | None = None) -> int:
    """Plan and report. Return 2 if an input cannot be used or an extra is missing."""
    flags = _parser().parse_args(argv)
    return run("prfaas-solve", lambda: _run(flags))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="prfaas-solve", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {prfaas.__version__}")
    parser.add_argument(
        "--deployment", metavar="FILE", help="clusters, links and objectives as YAML; the case study without"
    )
    parser.add_argument(
        "--trace",
        metavar="SPEC|FILE",
        help='"lognormal:mu=9.9,sigma=1,output=1024", or a CSV, JSONL or ShareGPT-like JSON file',
    )
    parser.add_argument("--model", metavar="NAME|CONFIG", help="a catalogued model or a Hugging Face config.json")
    parser.add_argument(
        "--pd", metavar="GPUS", help='PD clusters in place of a file: "64xH20", or "64xH20:4" for instances of 4 GPUs'
    )
    parser.add_argument("--prfaas", metavar="GPUS", help='with --pd: PrfaaS clusters, such as "16xH100"')
    parser.add_argument("--explain", action="store_true", help="print everything behind the plan")
    parser.add_argument("--bandwidth", metavar="RATE", help='egress of every PrfaaS cluster, such as "100Gbps"')
    parser.add_argument("--slo", metavar="SLO", help='"decode=40tok/s,ttft=5s,quantile=90%%"')
    parser.add_argument(
        "--prices", metavar="PRICES", help='price of an instance and hour by cluster or hardware: "h200=4,h20=1.5"'
    )
    parser.add_argument(
        "--egress-price", metavar="PRICE", help='of a GB that leaves: "0.05, 0.02@22-6"; "400/Gbps" a month at P95'
    )
    parser.add_argument(
        "--demand",
        metavar="RATE",
        help='print the cheapest fleet for "2req/s" or "0.5req/s, 2req/s@8-18", at --load of its Λ_max',
    )
    parser.add_argument("--budget", metavar="PRICE", help="print the fleet that serves most for this price of an hour")
    parser.add_argument(
        "--hour", metavar="HOUR", type=float, help="with --demand: hour of the day whose egress price counts"
    )
    parser.add_argument(
        "--load", metavar="LOAD", default="80%", help='arrivals for TTFT with queues: "80%%" of Λ_max, or "2.5req/s"'
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a report with plots there (extra: plot)")
    parser.add_argument("--plot", metavar="DIR", type=Path, help="write plots there, as SVG (extra: plot)")
    parser.add_argument("--emit", metavar="FILE", type=Path, help="write the plan as settings for prfaas-manager")
    return parser


def _run(flags: argparse.Namespace) -> int:
    command = startup.load_extra("prfaas.solve.command", extra="site")
    screen = startup.load_extra("prfaas.solve.report.screen", extra="site")
    study = command.plan_for(flags)
    answer = screen.answer(study)
    if flags.json:
        export = startup.load_extra("prfaas.solve.report.export", extra="site")
        print(json.dumps(export.to_json(study), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(screen.to_text(answer), end="")
        if flags.explain:
            print("\n" + "\n\n".join(section.to_text() for section in screen.sections(study)))
    if flags.emit is not None:
        export = startup.load_extra("prfaas.solve.report.export", extra="site")
        flags.emit.write_text(export.manager_settings(study), encoding="utf-8")
    if flags.html is not None:
        page = startup.load_extra("prfaas.solve.report.page", extra="plot")
        flags.html.write_text(page.to_html(study, answer), encoding="utf-8")
    if flags.plot is not None:
        plots = startup.load_extra("prfaas.solve.report.plots", extra="plot")
        flags.plot.mkdir(parents=True, exist_ok=True)
        for name, figure in plots.draw_all(study).items():
            plots.save(figure, flags.plot / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
