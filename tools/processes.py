"""Child processes with a log each, which end with their parent and stop in reverse order."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STOP_SECONDS = 20.0
GRANDCHILDREN_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessDied(RuntimeError):
    """A child ended or did not become ready. The message contains the end of its log."""


@dataclass(eq=False)
class Child:
    """Process in a session of its own."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    command: Sequence[str] = ()
    environment: Mapping[str, str] | None = None

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def is_alive(self) -> bool:
        return self.process.poll() is None


class Children:
    """Processes of one deployment, with their temporary files in `directory`. Leaving the context stops them."""

    def __init__(
        self, directory: Path, *, check: Callable[[], None] = lambda: None, inside: Sequence[str] = ()
    ) -> None:
        """Create an empty group. `check` runs while waiting and may raise; `inside` precedes every command."""
        self._directory = directory
        self._inside = tuple(inside)
        self._check = check
        self._children: list[Child] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> Child:
        log = self._directory / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self._inside, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self._directory), **(environment or {})},
                preexec_fn=_die_with_parent,
            )
        child = Child(name, process, log, command, environment)
        self._children.append(child)
        return child

    def kill_and_restart(self, child: Child) -> Child:
        """Kill a child and its session with SIGKILL, then start the same command again."""
        _signal(child, signal.SIGKILL)
        child.process.wait()
        self._children.remove(child)
        return self.start(child.name, child.command, environment=child.environment)

    def restart(self, child: Child) -> Child:
        """Stop a child with SIGTERM, then start the same command again."""
        self.stop_child(child)
        return self.start(child.name, child.command, environment=child.environment)

    def wait_until(self, child: Child, ready: Callable[[], bool], *, seconds: float) -> None:
        """Wait until `ready()` returns true.

        Raises:
            ProcessDied: The child ended first, or the deadline passed.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            self._check()
            if not child.is_alive():
                raise ProcessDied(f"{child.name} ended with status {child.process.returncode}:\n{child.tail()}")
            if time.monotonic() > deadline:
                raise ProcessDied(f"{child.name} was not ready within {seconds:.0f} s:\n{child.tail()}")
            time.sleep(0.02)

    def stop_child(self, child: Child) -> None:
        """Send SIGTERM to a child's session, then SIGKILL to what remains."""
        _signal(child, signal.SIGTERM)
        _end(child, deadline=time.monotonic() + STOP_SECONDS)
        self._children.remove(child)

    def stop(self) -> None:
        """Send SIGTERM to every session, newest first, then SIGKILL to what remains."""
        for child in reversed(self._children):
            _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for child in reversed(self._children):
            _end(child, deadline=deadline)
        self._children.clear()


def _end(child: Child, *, deadline: float) -> None:
    """Wait until a signalled child has ended, then kill the rest of its session."""
    try:
        child.process.wait(max(0.1, deadline - time.monotonic()))
        _wait_for_grandchildren(child)
    except subprocess.TimeoutExpired:
        pass
    _signal(child, signal.SIGKILL)  # Grandchildren may remain.
    child.process.wait()


def _signal(child: Child, number: signal.Signals) -> None:
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        pass


def _wait_for_grandchildren(child: Child) -> None:
    """Give grandchildren time to end, because Python's resource tracker unlinks semaphores last."""
    deadline = time.monotonic() + GRANDCHILDREN_SECONDS
    while time.monotonic() < deadline:
        try:
            os.killpg(child.process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
