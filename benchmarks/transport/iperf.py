"""iperf3 over an emulated link, as a measure of the network itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import dataclass

from tools.wan import FAR, Wan


@dataclass(frozen=True)
class IperfRow:
    """Figures of one run, timed as a whole."""

    num_streams: int
    congestion_control: str
    num_bytes: float
    began_ns: int  # Monotonic clock, to within the start of the client.
    ended_ns: int
    cpu_seconds_per_gb: float


def is_installed() -> bool:
    return shutil.which("iperf3") is not None


def run(wan: Wan, num_bytes: int, *, num_streams: int, congestion_control: str) -> IperfRow:
    """Measure `num_bytes` from the start of the first connection to the arrival of the last byte."""
    server = wan.far(["iperf3", "-s", "-1", "-J"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # The server does not report when it listens.
    time.sleep(0.3)
    command = ["iperf3", "-c", FAR, "-n", str(num_bytes), "-P", str(num_streams), "-C", congestion_control, "-J"]
    client = wan.near(command, stdout=subprocess.PIPE)
    output, _ = client.communicate(timeout=300)
    ended_ns = time.monotonic_ns()
    server.wait(10)
    end = json.loads(output)["end"]
    received, usage = end["sum_received"], end["cpu_utilization_percent"]
    seconds = max(received["seconds"], end["sum_sent"]["seconds"])
    cpu = (usage["host_total"] + usage["remote_total"]) / 100 * seconds
    return IperfRow(
        num_streams,
        congestion_control,
        num_bytes=received["bytes"],
        began_ns=ended_ns - int(seconds * 1e9),
        ended_ns=ended_ns,
        cpu_seconds_per_gb=cpu / (received["bytes"] / 1e9),
    )
