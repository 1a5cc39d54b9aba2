"""Two "datacenters" on one machine: network namespaces joined by an emulated long link with rate, delay, loss and bursts.

`wanemu.c` carries the packets in user space (many kernels lack netem). Needs root, /dev/net/tun and a C compiler; names
carry the process id, so that several may exist. Real TCP of the kernel runs over it: what is measured is the kernel's
congestion control and our use of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

NEAR, FAR = "10.77.0.1", "10.77.0.2"
MTU = 1500
# TCP payload of a full segment over its bytes on the wire: 1448 of 1538, with 38 of Ethernet's framing.
PAYLOAD_RATIO = (MTU - 52) / (MTU + 38)
START_SECONDS = 5.0


@dataclass(frozen=True)
class WanShape:
    """A link, alike in both directions. With `second_bits_per_second` its rate alternates every `period_seconds`."""

    bits_per_second: float
    rtt_seconds: float
    loss: float = 0.0  # of segments
    second_bits_per_second: float = 0.0
    period_seconds: float = 0.0

    @property
    def mean_bits_per_second(self) -> float:
        second = self.second_bits_per_second
        return (self.bits_per_second + second) / 2 if second else self.bits_per_second

    @property
    def payload_bytes_per_second(self) -> float:
        """What TCP can carry of payload, on average over its phases."""
        return self.mean_bits_per_second / 8 * PAYLOAD_RATIO

    def payload_bytes_between(self, began_ns: int, ended_ns: int) -> float:
        """What TCP can carry of payload between two times of the monotonic clock, in whose phases the rate alternates."""
        if not self.second_bits_per_second:
            return self.payload_bytes_per_second * (ended_ns - began_ns) / 1e9
        period, bits = int(self.period_seconds * 1e9), 0.0
        for phase in range(began_ns // period, ended_ns // period + 1):
            rate = self.second_bits_per_second if phase & 1 else self.bits_per_second
            bits += rate * (min(ended_ns, (phase + 1) * period) - max(began_ns, phase * period)) / 1e9
        return bits / 8 * PAYLOAD_RATIO

    @property
    def queue_bytes(self) -> float:
        """The drop-tail queue before the link: its bandwidth-delay product, at least 4 MB."""
        return max(4e6, self.bits_per_second / 8 * self.rtt_seconds)


PROFILES = {
    "metro": WanShape(10e9, 0.002),
    "regional": WanShape(5e9, 0.030, 0.0001),
    "continental": WanShape(2e9, 0.080, 0.001),
    "bursty": WanShape(1e9, 0.040, 0.0005, 0.3e9, 2.0),
}


def obstacle() -> str | None:
    """Why no link can be made here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("ip", "cc") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)} (Debian: iproute2, gcc)"
    return None if Path("/dev/net/tun").exists() else "needs /dev/net/tun"


class Wan:
    """The link and its two namespaces, for as long as the context lasts."""

    def __init__(self, shape: WanShape) -> None:
        """Raises RuntimeError where no link can be made."""
        if reason := obstacle():
            raise RuntimeError(f"an emulated link {reason}")
        self.shape = shape
        self._names = tuple(f"prfaas-{os.getpid()}-{end}" for end in ("near", "far"))
        self._directory = Path(tempfile.mkdtemp(prefix="prfaas-wan-"))
        self._emulator: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Wan:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        program = self._directory / "wanemu"
        _run("cc", "-O2", "-o", str(program), str(Path(__file__).with_name("wanemu.c")), "-lm")
        for name in self._names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        self._configure()
        self._emulator = subprocess.Popen(
            [str(program), *self._names, str(self._directory / "link"), str(self._directory / "stats")],
            stdout=subprocess.DEVNULL,
        )
        for name, address in zip(self._names, (NEAR, FAR), strict=True):
            self._await_device(name)
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wan0")
            _run("ip", "-n", name, "link", "set", "wan0", "mtu", str(MTU), "txqueuelen", "20000", "up")
            _run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_no_metrics_save=1")

    def _await_device(self, name: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while subprocess.run(["ip", "-n", name, "link", "show", "wan0"], capture_output=True).returncode:
            if time.monotonic() > deadline:
                raise RuntimeError("the emulator does not start")
            time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        if self._emulator is not None:
            self._emulator.terminate()
            self._emulator.wait()
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        shutil.rmtree(self._directory)

    def set(self, shape: WanShape) -> None:
        """Another shape from here on; what is under way stays under way."""
        self.shape = shape
        self._configure()
        assert self._emulator is not None
        self._emulator.send_signal(1)

    def _configure(self) -> None:
        its = self.shape
        line = f"{its.bits_per_second:.0f} {its.rtt_seconds * 5e5:.0f} 0 {its.loss} {its.queue_bytes:.0f}"
        if its.second_bits_per_second:
            line += f" {its.second_bits_per_second:.0f} {its.period_seconds * 1e3:.0f}"
        path = self._directory / "link"
        path.with_suffix(".new").write_text(f"ab {line}\nba {line}\n")
        path.with_suffix(".new").rename(path)

    def inside(self, end: Literal["near", "far"]) -> list[str]:
        """What a command is put behind to run at one end."""
        return ["ip", "netns", "exec", self._names[0 if end == "near" else 1]]

    def near(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process at the near end."""
        return self._start_in(self._names[0], command, options)

    def far(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process at the far end, whose address is `FAR`."""
        return self._start_in(self._names[1], command, options)

    def _start_in(self, name: str, command: Sequence[str], options: dict[str, Any]) -> subprocess.Popen[str]:
        return subprocess.Popen(["ip", "netns", "exec", name, *command], text=True, **options)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
