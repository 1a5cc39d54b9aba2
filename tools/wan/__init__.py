"""Two "datacenters" on one machine: network namespaces joined by an emulated long link with rate, delay, loss and bursts.

The kernel's netem carries the packets where it has that, else `wanemu.c` does in user space (many kernels lack it). Needs
root; names carry the process id, so that several may exist. Real TCP of the kernel runs over it: what is measured is the
kernel's congestion control and our use of it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any, Literal

from tools.wan.command import run
from tools.wan.emulator import Emulator
from tools.wan.netem import Netem
from tools.wan.shape import MTU, PAYLOAD_RATIO, PROFILES, WanShape

__all__ = ["CARRIERS", "FAR", "NEAR", "PAYLOAD_RATIO", "PROFILES", "Carrier", "Wan", "WanShape", "chosen", "obstacle"]

NEAR, FAR = "10.77.0.1", "10.77.0.2"
Carrier = Literal["netem", "wanemu"]
CARRIERS: dict[Carrier, type[Netem] | type[Emulator]] = {"netem": Netem, "wanemu": Emulator}


def obstacle(carrier: Carrier | None = None) -> str | None:
    """Why no link can be made here, by this carrier or by any, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if carrier is None and Netem.obstacle() is None:
        return None
    return CARRIERS[carrier or "wanemu"].obstacle()


def chosen() -> tuple[Carrier, str]:
    """What carries a link here where nothing else is asked for, and why."""
    without = Netem.obstacle()
    return ("wanemu", f"netem {without}") if without else ("netem", "the kernel has it")


class Wan:
    """The link and its two namespaces, for as long as the context lasts."""

    def __init__(self, shape: WanShape, *, carrier: Carrier | None = None) -> None:
        """`carrier` None: netem, or wanemu where the kernel has none. Raises RuntimeError where no link can be made."""
        if reason := obstacle(carrier):
            raise RuntimeError(f"an emulated link {reason}")
        self.carrier: Carrier
        self.carrier, self.why = (carrier, "as asked") if carrier else chosen()
        self.shape = shape
        self._names = tuple(f"prfaas-{os.getpid()}-{end}" for end in ("near", "far"))
        self._carries = CARRIERS[self.carrier](*self._names)

    def __enter__(self) -> Wan:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        for name in self._names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        self._carries.start(self.shape)
        for name, address in zip(self._names, (NEAR, FAR), strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wan0")
            run("ip", "-n", name, "link", "set", "wan0", "mtu", str(MTU), "txqueuelen", "20000", "up")
            run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_no_metrics_save=1")

    def __exit__(self, *_: object) -> None:
        self._carries.stop()
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def set(self, shape: WanShape) -> None:
        """Another shape from here on; what is under way stays under way."""
        self.shape = shape
        self._carries.set(shape)

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
