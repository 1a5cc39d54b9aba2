"""Emulated long link between two network namespaces, with rate, delay, loss and bursts. Needs root.

The kernel's netem carries the packets, or `wanemu.c` in user space if the kernel has no netem. The kernel's own TCP runs
over the link, so measurements include its congestion control. Names contain the process id, so links may coexist.
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

__all__ = ["CARRIERS", "FAR", "NEAR", "PAYLOAD_RATIO", "PROFILES", "Carrier", "Wan", "WanShape", "choose", "obstacle"]

NEAR, FAR = "10.77.0.1", "10.77.0.2"
Carrier = Literal["netem", "wanemu"]
CARRIERS: dict[Carrier, type[Netem] | type[Emulator]] = {"netem": Netem, "wanemu": Emulator}


def obstacle(carrier: Carrier | None = None) -> str | None:
    """Return why this carrier, or any carrier, cannot run here; None if it can."""
    if os.geteuid() != 0:
        return "needs root"
    if carrier is None and Netem.obstacle() is None:
        return None
    return CARRIERS[carrier or "wanemu"].obstacle()


def choose() -> tuple[Carrier, str]:
    """Return the default carrier on this machine, and the reason."""
    missing = Netem.obstacle()
    return ("wanemu", f"netem {missing}") if missing else ("netem", "the kernel has it")


class Wan:
    """Link with two namespaces, which exist while the context is open."""

    def __init__(self, shape: WanShape, *, carrier: Carrier | None = None) -> None:
        """Choose a carrier if `carrier` is None. Raise RuntimeError if the carrier cannot run here."""
        if reason := obstacle(carrier):
            raise RuntimeError(f"an emulated link {reason}")
        self.carrier: Carrier
        self.carrier, self.why = (carrier, "as asked") if carrier else choose()
        self.shape = shape
        self._names = tuple(f"prfaas-{os.getpid()}-{end}" for end in ("near", "far"))
        self._emulation = CARRIERS[self.carrier](*self._names)

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
        self._emulation.start(self.shape)
        for name, address in zip(self._names, (NEAR, FAR), strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wan0")
            run("ip", "-n", name, "link", "set", "wan0", "mtu", str(MTU), "txqueuelen", "20000", "up")
            run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_no_metrics_save=1")

    def __exit__(self, *_: object) -> None:
        self._emulation.stop()
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def set(self, shape: WanShape) -> None:
        """Change the shape for packets that follow."""
        self.shape = shape
        self._emulation.set(shape)

    def inside(self, end: Literal["near", "far"]) -> list[str]:
        """Return the command prefix that runs a command at one end."""
        return ["ip", "netns", "exec", self._names[0 if end == "near" else 1]]

    def near(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process at the near end."""
        return self._start_in(self._names[0], command, options)

    def far(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process at the far end, whose address is `FAR`."""
        return self._start_in(self._names[1], command, options)

    def _start_in(self, name: str, command: Sequence[str], options: dict[str, Any]) -> subprocess.Popen[str]:
        return subprocess.Popen(["ip", "netns", "exec", name, *command], text=True, **options)
