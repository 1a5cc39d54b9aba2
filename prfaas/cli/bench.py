"""`prfaas-bench`: measures how fast a link between two hosts carries a model's KV, and recommends changes."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import prfaas
from prfaas import grants
from prfaas.bench.link import BenchReceiver, BenchSender, Progress
from prfaas.bench.report import Host, Measurement, render, to_json
from prfaas.cli import startup
from prfaas.cli.arguments import OneLineParser, run, value_of
from prfaas.errors import RemoteProtocolError
from prfaas.transport.sender.stats import LinkStats

KERNEL = Path("/proc/sys/net")
MAX_TOKENS = (1 << 32) - 1
NUM_LAYERS, LAYER_BYTES = 64, 16 << 20  # Sent without a model.
REFUSAL_REPORT_SECONDS = 1.0  # Interval of the receiver's report of rejected connections.


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or serve as the receiver; 2 when a flag cannot be used, 1 when the receiver refuses or disconnects."""
    flags = _parser().parse_args(argv)
    try:
        return run("prfaas-bench", lambda: _serve(flags) if flags.listen else _measure(flags))
    except RemoteProtocolError as error:
        sys.stderr.write(f"prfaas-bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("prfaas-bench: interrupted\n")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="prfaas-bench", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {prfaas.__version__}")
    link = parser.add_subparsers(dest="what", required=True).add_parser("link", help="the wire between two hosts")
    end = link.add_mutually_exclusive_group(required=True)
    end.add_argument("--listen", metavar="HOST:PORT", type=value_of("address"), help="receive at this address")
    end.add_argument("--to", metavar="HOST:PORT", type=value_of("address"), help="send to the receiver at this address")
    link.add_argument("--secret-file", required=True, type=Path, metavar="FILE", help="the deployment's secret")
    link.add_argument(
        "--model", metavar="NAME|CONFIG", help="send its layers; see prfaas-solve; without it 64 layers of 16 MiB"
    )
    link.add_argument(
        "--tokens",
        type=value_of("tokens", least=1, most=MAX_TOKENS),
        default="32K",
        metavar="N",
        help="of the prompt; 32K by default",
    )
    link.add_argument("--profile", metavar="NAME|FILE", help="pace the layers as this instance's prefill of --tokens")
    link.add_argument(
        "--link-rate", type=value_of("rate"), default=0.0, metavar="RATE", help="what the link should carry"
    )
    link.add_argument(
        "--repeats", type=value_of("count", least=1), default="5", metavar="N", help="warm transfers; 5 by default"
    )
    link.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _key(flags: argparse.Namespace) -> bytes:
    return grants.derive_key(grants.read_secret(flags.secret_file), "bench")


def _serve(flags: argparse.Namespace) -> int:
    """Run the receiver until SIGINT or SIGTERM."""
    stopping = {signal.SIGINT, signal.SIGTERM}
    # All later threads inherit the mask, so that only sigtimedwait below gets the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    receiver = BenchReceiver(flags.listen, key=_key(flags), report=_print_line)
    _print_line(f"listening on {receiver.start()}")
    refused: dict[str, int] = {}
    while signal.sigtimedwait(stopping, REFUSAL_REPORT_SECONDS) is None:
        if refused != (refused := receiver.refused):
            _print_line(f"connections rejected so far: {', '.join(f'{why} {count}' for why, count in refused.items())}")
    receiver.close()
    return 0


def _print_line(line: str) -> None:
    print(line, flush=True)


def _measure(flags: argparse.Namespace) -> int:
    sizes, prefill_seconds = _layers(flags)
    near = BenchSender(flags.to, key=_key(flags), layer_bytes=sizes)
    try:
        found = _runs(near, sizes, prefill_seconds, flags)
    finally:
        near.close()
    host = _host()
    text = json.dumps(to_json(found, host), indent=2) + "\n" if flags.json else render(found, host)
    print(text, end="")
    return 0


def _runs(near: BenchSender, sizes: list[int], prefill_seconds: float, flags: argparse.Namespace) -> Measurement:
    progress = _progress(sum(sizes))
    try:
        cold = near.run(pause_seconds=0.0, progress=progress)
        warm = [near.run(pause_seconds=0.0, progress=progress) for _ in range(flags.repeats)]
        pause = prefill_seconds / len(sizes)
        paced = [near.run(pause_seconds=pause, progress=progress) for _ in range(flags.repeats if pause else 0)]
    finally:
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
    return Measurement(cold, warm, paced, prefill_seconds, flags.link_rate)


def _layers(flags: argparse.Namespace) -> tuple[list[int], float]:
    """Return the bytes of each layer and the seconds of their prefill, 0 without a profile."""
    sizes = [LAYER_BYTES] * NUM_LAYERS
    if flags.model is None and flags.profile is None:
        return sizes, 0.0
    catalog = startup.load_extra("prfaas.solve.files.catalog", extra="solve")
    if flags.model is not None:
        layer_sizes = startup.load_extra("prfaas.bench.layer_sizes", extra="solve").layer_sizes
        sizes = layer_sizes(catalog.find_model(flags.model), flags.tokens)
    seconds = catalog.find_profile(flags.profile).prefill.seconds(flags.tokens) if flags.profile is not None else 0.0
    return sizes, seconds


def _progress(num_bytes: int) -> Progress:
    """Return a callback that shows progress on a terminal."""

    def show(arrived_bytes: int, state: LinkStats) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{progress_line(arrived_bytes / num_bytes, state)}")
            sys.stderr.flush()

    return show


def progress_line(arrived_ratio: float, link: LinkStats) -> str:
    """Return one line about a transfer in progress."""
    if not link.num_connections:
        return f"{arrived_ratio:6.1%}, no connection to the receiver"
    rate, waiting = link.achievable_bytes_per_second * 8e-9, link.queued_bytes + link.unacknowledged_bytes
    to_go = f"{waiting / 1e6:.0f} MB to go on {link.num_connections} connections"
    carries = f"the link carries {rate:.2f} Gbit/s" if rate else "rate not known yet"
    kernel = f"RTT {link.rtt_seconds * 1e3:.1f} ms, sent again {link.retransmit_ratio:.3%}"
    congested = f", congested: {link.congestion}" if link.congestion else ""
    return f"{arrived_ratio:6.1%}, {to_go}, {carries}, {kernel}{congested}"


def _host() -> Host:
    """Return the kernel's limits on this host."""
    try:
        available = (KERNEL / "ipv4/tcp_available_congestion_control").read_text().split()
        return Host(int((KERNEL / "core/wmem_max").read_text()), "bbr" in available)
    except OSError:
        return Host(1 << 30, has_bbr=True)  # Another kernel has other names, so nothing is advised.


if __name__ == "__main__":
    sys.exit(main())
