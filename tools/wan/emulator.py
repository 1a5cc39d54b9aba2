"""Our own emulator (`wanemu.c`), which carries the packets of a link in user space."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tools.wan.command import run
from tools.wan.shape import WanShape

START_SECONDS = 5.0


class Emulator:
    """The device wan0 in each of two namespaces, and the process between them."""

    @staticmethod
    def obstacle() -> str | None:
        """Why it cannot run here, or None; that of root aside."""
        missing = [name for name in ("ip", "cc") if shutil.which(name) is None]
        if missing:
            return f"needs {' and '.join(missing)} (Debian: iproute2, gcc)"
        return None if Path("/dev/net/tun").exists() else "needs /dev/net/tun"

    def __init__(self, near: str, far: str) -> None:
        self._names = near, far
        self._directory = Path(tempfile.mkdtemp(prefix="prfaas-wan-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, shape: WanShape) -> None:
        """Make the devices."""
        program = self._directory / "wanemu"
        run("cc", "-O2", "-o", str(program), str(Path(__file__).with_name("wanemu.c")), "-lm")
        self._configure(shape)
        self._process = subprocess.Popen(
            [str(program), *self._names, str(self._directory / "link"), str(self._directory / "stats")],
            stdout=subprocess.DEVNULL,
        )
        for name in self._names:
            _await_device(name)

    def set(self, shape: WanShape) -> None:
        """Another shape from here on; what is under way stays under way."""
        assert self._process is not None
        self._configure(shape)
        self._process.send_signal(1)

    def stop(self) -> None:
        """End the process, and its devices with it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        shutil.rmtree(self._directory)

    def _configure(self, its: WanShape) -> None:
        line = f"{its.bits_per_second:.0f} {its.rtt_seconds * 5e5:.0f} 0 {its.loss} {its.queue_bytes:.0f}"
        if its.second_bits_per_second:
            line += f" {its.second_bits_per_second:.0f} {its.period_seconds * 1e3:.0f}"
        path = self._directory / "link"
        path.with_suffix(".new").write_text(f"ab {line}\nba {line}\n")
        path.with_suffix(".new").rename(path)


def _await_device(name: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while subprocess.run(["ip", "-n", name, "link", "show", "wan0"], capture_output=True).returncode:
        if time.monotonic() > deadline:
            raise RuntimeError("the emulator does not start")
        time.sleep(0.01)
