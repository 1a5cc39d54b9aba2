"""Emulation in user space by `wanemu.c`."""

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
    """Device wan0 in each of two namespaces, and the process between them."""

    @staticmethod
    def obstacle() -> str | None:
        """Return why the emulator cannot run here, apart from missing root rights; None if it can."""
        missing = [name for name in ("ip", "cc") if shutil.which(name) is None]
        if missing:
            return f"needs {' and '.join(missing)} (Debian: iproute2, gcc)"
        return None if Path("/dev/net/tun").exists() else "needs /dev/net/tun"

    def __init__(self, near: str, far: str) -> None:
        self._names = near, far
        self._directory = Path(tempfile.mkdtemp(prefix="prfaas-wan-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, shape: WanShape) -> None:
        """Create the devices."""
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
        """Change the shape for packets that follow."""
        assert self._process is not None
        self._configure(shape)
        self._process.send_signal(1)

    def stop(self) -> None:
        """Stop the process, which removes the devices."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        shutil.rmtree(self._directory)

    def _configure(self, shape: WanShape) -> None:
        line = f"{shape.bits_per_second:.0f} {shape.rtt_seconds * 5e5:.0f} 0 {shape.loss} {shape.queue_bytes:.0f}"
        if shape.second_bits_per_second:
            line += f" {shape.second_bits_per_second:.0f} {shape.period_seconds * 1e3:.0f}"
        path = self._directory / "link"
        path.with_suffix(".new").write_text(f"ab {line}\nba {line}\n")
        path.with_suffix(".new").rename(path)


def _await_device(name: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while subprocess.run(["ip", "-n", name, "link", "show", "wan0"], capture_output=True).returncode:
        if time.monotonic() > deadline:
            raise RuntimeError("the emulator does not start")
        time.sleep(0.01)
