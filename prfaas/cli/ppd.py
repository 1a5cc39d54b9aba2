"""`prfaas-ppd`: PPD's decision table. `build` measures it on live endpoints."""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import prfaas
from prfaas.cli import startup
from prfaas.cli.arguments import OneLineParser, list_of, run
from prfaas.ppd.table import FIRST_TURNS, REQUEST_RATES, SECOND_TURNS, PpdRun, build_table
from prfaas.scheduler.ppd import TableCell, to_measured

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Build a table. Return 2 for a bad flag or file, 1 when nothing could be measured."""
    flags = _parser().parse_args(argv)
    return run("prfaas-ppd", lambda: _build(flags))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="prfaas-ppd", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {prfaas.__version__}")
    commands = parser.add_subparsers(dest="what", required=True)
    build = commands.add_parser("build", help="measure a table")
    build.add_argument(
        "--pd",
        required=True,
        metavar="URL",
        help="router whose managers have local_policy: static and local_turns_ratio: 0",
    )
    build.add_argument(
        "--local", required=True, metavar="URL", help="router whose managers have the same with local_turns_ratio: 1"
    )
    build.add_argument("--model", required=True, help="served model name")
    build.add_argument("--out", required=True, type=Path, metavar="FILE", help="where the table goes")
    build.add_argument("--contexts", default=tuple(FIRST_TURNS), type=list_of(_word(FIRST_TURNS)), metavar="LIST")
    build.add_argument("--workloads", default=tuple(SECOND_TURNS), type=list_of(_word(SECOND_TURNS)), metavar="LIST")
    build.add_argument(
        "--seconds", default=10.0, type=_above_zero(float), help="of arrivals for each cell; 10 by default"
    )
    build.add_argument(
        "--vocabulary", default=1000, type=_above_zero(int), help="prompts are random token ids below it"
    )
    build.add_argument("--seed", default=0, type=int)
    build.add_argument(
        "--qps",
        default=REQUEST_RATES,
        type=list_of(_above_zero(float)),
        metavar="LIST",
        help="requests per second; a conversation makes two",
    )
    build.add_argument("--w-ttft", type=float, default=1.0, metavar="WEIGHT", help="of the table; 1 by default")
    build.add_argument("--w-tpot", type=float, default=1.0, metavar="WEIGHT", help="of the table; 1 by default")
    return parser


def _above_zero(kind: Callable[[str], T]) -> Callable[[str], T]:
    def read(text: str) -> T:
        value = kind(text)
        if not 0 < value < math.inf:  # type: ignore[operator]
            raise argparse.ArgumentTypeError(f"{text}: above 0")
        return value

    read.__name__ = kind.__name__
    return read


def _check_can_be_written(file: Path) -> None:
    """Raise OSError if the file cannot be written, before minutes of measurement."""
    is_there = file.exists()
    file.open("a").close()
    if not is_there:
        file.unlink()


def _word(known: dict[Any, Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
        return text

    return read


def _build(flags: argparse.Namespace) -> int:
    _check_can_be_written(flags.out)
    measurement = startup.load_extra("prfaas.ppd.measurement", extra="site")
    cells = [
        TableCell(context, kind, qps) for context in flags.contexts for kind in flags.workloads for qps in flags.qps
    ]
    pd, local = asyncio.run(_runs(measurement, flags, cells))
    try:
        table = build_table(pd, local, ttft_weight=flags.w_ttft, tpot_weight=flags.w_tpot)
    except ValueError as error:
        sys.stderr.write(f"prfaas-ppd: nothing to decide by: {error}\n")
        return 1
    flags.out.write_text(json.dumps(to_measured(table), indent=1) + "\n")
    print(f"{flags.out}: {len(table.entries)} cells")
    return 0


async def _runs(
    measurement: Any, flags: argparse.Namespace, cells: list[TableCell]
) -> tuple[list[PpdRun], list[PpdRun]]:
    """Return the runs of all cells on both routers.

    The routers are measured in turn, so that neither sees the load of the other. Cells in which a router did not
    follow the expected policy are left out.
    """
    ends = [
        measurement.MeasuredEndpoint(url.rstrip("/"), flags.model, route, flags.vocabulary)
        for url, route in ((flags.pd, "remote"), (flags.local, "local"))
    ]
    effort = measurement.MeasurementEffort(seconds=flags.seconds, seed=flags.seed)
    runs: tuple[list[PpdRun], list[PpdRun]] = ([], [])
    async with measurement.aiohttp.ClientSession(connector=measurement.aiohttp.TCPConnector(limit=0)) as session:
        for number, cell in enumerate(cells, 1):
            line = f"{number}/{len(cells)} {cell.context_class} {cell.workload_type} {cell.qps:g} QPS"
            pd, local = [await measurement.measure(session, end, cell, effort) for end in ends]
            sys.stderr.write(
                f"{line}: TTFT {pd.run.ttft_seconds:.3f} s by P, {local.run.ttft_seconds:.3f} s by D\n"
                + _stray_warning(line, "--pd", "by a PD-P instance", pd)
                + _stray_warning(line, "--local", "on the decode node", local)
            )
            if not (pd.has_strayed or local.has_strayed):
                runs[0].append(pd.run)
                runs[1].append(local.run)
    return runs


def _stray_warning(line: str, endpoint: str, where: str, measured: Any) -> str:
    """Return a warning about second turns that were prefilled elsewhere, or an empty text."""
    if not measured.strayed:
        return ""
    reasons = ", ".join(f"{reason} {count}" for reason, count in measured.strayed.most_common())
    left_out = "; the cell is left out" if measured.has_strayed else ""
    count = f"{measured.strayed.total()} of {measured.num_conversations} second turns"
    return f"{line}: {endpoint}: {count} were not prefilled {where} ({reasons}){left_out}\n"


if __name__ == "__main__":
    sys.exit(main())
