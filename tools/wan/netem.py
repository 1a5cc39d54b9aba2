"""The kernel's own emulator, netem, at both ends of a pair of virtual Ethernet devices."""

from __future__ import annotations

import math
import shutil
import threading
import time

from tools.wan.command import run
from tools.wan.shape import FRAMING_BYTES, MTU, WanShape

UNCOUNTED_BYTES = FRAMING_BYTES - 14  # of a segment's framing: the kernel counts the header alone

TRY = "ip link add wan0 type veth peer name wan1 && tc qdisc add dev wan0 root netem delay 1ms"


def arguments(shape: WanShape, *, at_seconds: float) -> list[str]:
    """What `tc qdisc` takes behind `netem` for one direction; `at_seconds` of the monotonic clock says the phase.

    Its limit counts whatever it holds: what is under way too. A rate takes segments one by one after their delay.
    """
    is_second = shape.second_bits_per_second and int(at_seconds / shape.period_seconds) & 1
    rate = shape.second_bits_per_second if is_second else shape.bits_per_second
    held = shape.queue_bytes + shape.bits_per_second / 8 * shape.rtt_seconds / 2
    return [
        *("delay", f"{shape.rtt_seconds * 5e5:.0f}us"),
        *("loss", f"{100 * shape.loss:g}%"),
        *("rate", f"{rate:.0f}bit", str(UNCOUNTED_BYTES)),
        *("limit", str(math.ceil(held / (MTU + FRAMING_BYTES)))),
    ]


class Netem:
    """The device wan0 in each of two namespaces, each with netem for what leaves by it."""

    @staticmethod
    def obstacle() -> str | None:
        """Why it cannot run here, or None; tried in a namespace that ends with the try, which needs root."""
        missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
        if missing:
            return f"needs {' and '.join(missing)} (Debian: iproute2, util-linux)"
        try:
            run("unshare", "--net", "sh", "-c", TRY)
        except RuntimeError as error:
            return f"needs a kernel that has it ({str(error).rpartition('Error: ')[2]})"
        return None

    def __init__(self, near: str, far: str) -> None:
        self._names = near, far
        self._ends = threading.Event()
        self._turns: threading.Thread | None = None

    def start(self, shape: WanShape) -> None:
        """Make the devices."""
        near, far = self._names
        run("ip", "-n", near, "link", "add", "wan0", "type", "veth", "peer", "name", "wan0", "netns", far)
        for name in self._names:  # it drops what it is given whole: a packet of many segments would be one
            run("ip", "-n", name, "link", "set", "wan0", "gso_max_segs", "1")
        self._shape("add", shape)

    def set(self, shape: WanShape) -> None:
        """Another shape from here on; what is under way stays under way."""
        self._still()
        self._shape("change", shape)

    def stop(self) -> None:
        """End what alternates; the devices end with their namespaces."""
        self._still()

    def _shape(self, verb: str, shape: WanShape) -> None:
        self._apply(verb, shape)
        if shape.second_bits_per_second:
            self._turns = threading.Thread(target=self._alternate, args=(shape,), name="wan-turns", daemon=True)
            self._turns.start()

    def _apply(self, verb: str, shape: WanShape) -> None:
        its = arguments(shape, at_seconds=time.monotonic())
        for name in self._names:
            run("tc", "-n", name, "qdisc", verb, "dev", "wan0", "root", "netem", *its)

    def _alternate(self, shape: WanShape) -> None:
        period = shape.period_seconds
        while not self._ends.wait(period - time.monotonic() % period):
            self._apply("change", shape)

    def _still(self) -> None:
        if self._turns is not None:
            self._ends.set()
            self._turns.join()
            self._ends.clear()
            self._turns = None
