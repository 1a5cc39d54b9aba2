"""iperf3 over an emulated link: what the network itself carries."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import dataclass

from tools.wan import FAR, Wan


@dataclass(frozen=True)
class IperfRow:
    """One run, timed as a whole."""

    num_streams: int
    congestion_control: str
    num_bytes: float
    began_ns: int  # of the monotonic clock, to within the client's own start
    ended_ns: int
    cpu_seconds_per_gb: float


def is_installed() -> bool:
    return shutil.which("iperf3") is not None


def run(wan: Wan, num_bytes: int, *, num_streams: int, congestion_control: str) -> IperfRow:
    """Send `num_bytes`, from the first connection's start to the last byte's arrival."""
    server = wan.far(["iperf3", "-s", "-1", "-J"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(0.3)  # it says nothing when it listens
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
