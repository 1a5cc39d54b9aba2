"""Report of a link measurement, as text or JSON, with recommendations."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prfaas.bench.link import TransferRun

LONG_RTT_SECONDS = 0.005
SEND_BUFFER_BYTES = 4 << 20  # Size that each connection asks for.
LOSSY_RATIO = 0.03  # More retransmissions mean an overflowing queue rather than a noisy link.
BUSY_CORES = 0.9


@dataclass(frozen=True)
class Host:
    """Kernel settings of this host."""

    max_send_buffer_bytes: int
    has_bbr: bool


@dataclass(frozen=True)
class Measurement:
    """Runs over one link: a cold one on new connections, warm ones, and some at the pace of a prefill."""

    cold: TransferRun
    warm: Sequence[TransferRun]
    paced: Sequence[TransferRun] = ()
    prefill_seconds: float = 0.0  # Time in which the layers of the paced runs became ready.
    link_bytes_per_second: float = 0.0  # Nominal rate of the link; 0 if unknown.

    @property
    def bytes_per_second(self) -> float:
        return statistics.median(run.bytes_per_second for run in self.warm)


def to_json(measurement: Measurement, host: Host) -> dict[str, Any]:
    """Return every figure in base units, with spreads as median, min and max."""
    figures: dict[str, Any] = {
        "num_bytes": measurement.cold.num_bytes,
        "cold_bytes_per_second": measurement.cold.bytes_per_second,
        "bytes_per_second": _spread([run.bytes_per_second for run in measurement.warm]),
        "first_byte_seconds": _spread([run.first_seconds for run in measurement.warm]),
        "sender_cpu_seconds_per_gb": _spread([run.cpu_seconds / run.num_bytes * 1e9 for run in measurement.warm]),
        "min_rtt_seconds": measurement.warm[-1].link.min_rtt_seconds,
        "num_connections": measurement.warm[-1].link.num_connections,
        "retransmit_ratio": measurement.warm[-1].link.retransmit_ratio,
        "checksum_failures": sum(
            run.checksum_failures for run in (measurement.cold, *measurement.warm, *measurement.paced)
        ),
        "recommendations": recommendations(measurement, host),
    }
    if measurement.link_bytes_per_second:
        figures["link_ratio"] = measurement.bytes_per_second / measurement.link_bytes_per_second
    if measurement.paced:
        figures["prefill_seconds"] = measurement.prefill_seconds
        figures["exposed_seconds"] = _spread([run.exposed_seconds for run in measurement.paced])
    return figures


def render(measurement: Measurement, host: Host) -> str:
    """Return the figures as text."""
    found = to_json(measurement, host)
    ratio = f", {found['link_ratio']:.3f} of the link" if "link_ratio" in found else ""
    rows = [
        ("sent", f"{measurement.cold.num_bytes / 1e6:.1f} MB, {len(measurement.warm) + 1} times at once"),
        ("goodput, warm", f"{_show(found['bytes_per_second'], 8e-9, 'Gbit/s', 3)}{ratio}"),
        ("goodput, cold", f"{measurement.cold.bytes_per_second * 8e-9:.3f} Gbit/s"),
        ("first byte", _show(found["first_byte_seconds"], 1e3, "ms", 1)),
        ("CPU of this host", _show(found["sender_cpu_seconds_per_gb"], 1, "s/GB", 3)),
        ("round trip", f"{found['min_rtt_seconds'] * 1e3:.2f} ms at least"),
        ("connections", f"{found['num_connections']}"),
        ("sent again", f"{found['retransmit_ratio']:.4%} of the bytes"),
    ]
    if measurement.paced:
        exposed = _show(found["exposed_seconds"], 1e3, "ms", 1)
        rows.append(("exposed", f"{exposed}, behind a prefill of {measurement.prefill_seconds:.3f} s"))
    lines = [f"{name:18}{value}" for name, value in rows]
    return "\n".join([*lines, *(f"→ {text}" for text in found["recommendations"])]) + "\n"


def recommendations(measurement: Measurement, host: Host) -> list[str]:
    """Return advice for a faster link, the most effective first."""
    link, last = measurement.warm[-1].link, measurement.warm[-1]
    is_long = link.min_rtt_seconds >= LONG_RTT_SECONDS
    cores = last.cpu_seconds / last.seconds
    advice = []
    if is_long and not host.has_bbr:
        advice.append("BBR is not available here: `modprobe tcp_bbr`; without it a long link with losses stays idle")
    if is_long and host.max_send_buffer_bytes < SEND_BUFFER_BYTES:
        advice.append(f"raise net.core.wmem_max to {SEND_BUFFER_BYTES}: it bounds each connection's bytes in flight")
    if link.retransmit_ratio > LOSSY_RATIO:
        rate = 0.95 * measurement.bytes_per_second * 8e-9
        entry = f"{{peers: '*', max_rate: {rate:.2f}Gbps, each: true}}"
        advice.append(f"the path's queue overflows: set egress of the agent to [{entry}]")
    if cores > BUSY_CORES:
        advice.append(f"sending took {cores:.1f} processors: keep as many free for the agent")
    prefill_rate = measurement.cold.num_bytes / measurement.prefill_seconds if measurement.prefill_seconds else 0.0
    if prefill_rate > measurement.bytes_per_second:
        advice.append(
            f"prefill makes {prefill_rate * 8e-9:.2f} Gbit/s of KV, more than the link "
            "carries: such prompts wait for the link; see prfaas-solve for the threshold"
        )
    return advice


def _spread(values: Sequence[float]) -> dict[str, float]:
    of: dict[str, Callable[[Sequence[float]], float]] = {"median": statistics.median, "min": min, "max": max}
    return {name: function(values) for name, function in of.items()}


def _show(spread: dict[str, float], scale: float, unit: str, digits: int) -> str:
    median, low, high = (f"{spread[name] * scale:.{digits}f}" for name in ("median", "min", "max"))
    return f"{median} {unit} ({low} to {high})"
