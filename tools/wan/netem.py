"""Emulation by the kernel's netem at both ends of a pair of virtual Ethernet devices."""

from __future__ import annotations

import math
import shutil
import threading
import time

from tools.wan.command import run
from tools.wan.shape import FRAMING_BYTES, MTU, WanShape

UNCOUNTED_BYTES = FRAMING_BYTES - 14  # The kernel counts only the Ethernet header.

TRY = "ip link add wan0 type veth peer name wan1 && tc qdisc add dev wan0 root netem delay 1ms"


def arguments(shape: WanShape, *, at_seconds: float) -> list[str]:
    """Return the netem arguments for one direction, in the phase at `at_seconds` of the monotonic clock.

    The limit includes packets in flight, because netem applies the rate after the delay.
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
    """Device wan0 in each of two namespaces, with netem for outgoing packets."""

    @staticmethod
    def obstacle() -> str | None:
        """Return why netem cannot run here; None if it can. The test uses a temporary namespace and needs root."""
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
        self._stops = threading.Event()
        self._turns: threading.Thread | None = None

    def start(self, shape: WanShape) -> None:
        """Create the devices."""
        near, far = self._names
        run("ip", "-n", near, "link", "add", "wan0", "type", "veth", "peer", "name", "wan0", "netns", far)
        # Netem drops whole packets, so a packet must not contain several segments.
        for name in self._names:
            run("ip", "-n", name, "link", "set", "wan0", "gso_max_segs", "1")
        self._shape("add", shape)

    def set(self, shape: WanShape) -> None:
        """Change the shape for packets that follow."""
        self._stop_alternating()
        self._shape("change", shape)

    def stop(self) -> None:
        """Stop alternating rates. The devices disappear with their namespaces."""
        self._stop_alternating()

    def _shape(self, verb: str, shape: WanShape) -> None:
        self._apply(verb, shape)
        if shape.second_bits_per_second:
            self._turns = threading.Thread(target=self._alternate, args=(shape,), name="wan-turns", daemon=True)
            self._turns.start()

    def _apply(self, verb: str, shape: WanShape) -> None:
        netem = arguments(shape, at_seconds=time.monotonic())
        for name in self._names:
            run("tc", "-n", name, "qdisc", verb, "dev", "wan0", "root", "netem", *netem)

    def _alternate(self, shape: WanShape) -> None:
        period = shape.period_seconds
        while not self._stops.wait(period - time.monotonic() % period):
            self._apply("change", shape)

    def _stop_alternating(self) -> None:
        if self._turns is not None:
            self._stops.set()
            self._turns.join()
            self._stops.clear()
            self._turns = None
