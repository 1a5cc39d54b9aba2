"""A process that has loaded torch and forks the sides: a side that died is there again in milliseconds, not in seconds.

python -m prfaas.colocate.processes.forkserver CONTROL_FD
It runs no thread and touches no GPU, so that what it forks may do both. A packet on the control socket asks for a side
and brings its own control socket; the answer brings a pidfd, which tells the death of a process that is not our child.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgpack

from prfaas import logs
from prfaas.colocate.processes import side as side_process
from prfaas.colocate.processes.shared_memory import Side

log = logs.get("colocate.nursery")

MAX_PACKET_BYTES = 1 << 16


@dataclass(frozen=True)
class Born:
    """A side that runs; the receiver owns the pidfd."""

    side: Side
    pid: int
    pid_fd: int


class Nursery:
    """The owner's end, on the running loop. `died` is told which sides will not come; it may `open` another one."""

    def __init__(self, born: Callable[[Born], None], died: Callable[[list[Side]], None]) -> None:
        self._born, self._died = born, died
        self._loop = asyncio.get_running_loop()
        self._awaited: list[Side] = []
        self.open()

    def open(self) -> None:
        """Start the process."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "prfaas.colocate.processes.forkserver", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._loop.add_reader(self._control.fileno(), self._on_packet)

    @property
    def pid(self) -> int:
        return self._process.pid

    def bear(self, side: Side, control: socket.socket, environment: Mapping[str, str]) -> None:
        """Ask for a side; `control` is its own end of the control socket and is closed here."""
        self._awaited.append(side)
        with control:
            try:
                socket.send_fds(self._control, [msgpack.packb([side, dict(environment)])], [control.fileno()])
            except OSError:
                pass  # the nursery has died: its socket tells the rest

    def _on_packet(self) -> None:
        packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
        if not packet:
            self._on_death()
            return
        side, pid = msgpack.unpackb(packet)
        self._awaited.remove(side)
        self._born(Born(side, pid, fds[0]))

    def _on_death(self) -> None:
        log.warning("nursery.died", pid=self.pid)
        self._leave()
        self._process.wait()
        unborn, self._awaited = self._awaited, []
        self._died(unborn)

    def _leave(self) -> None:
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()

    def close(self) -> None:
        """End the nursery, not its sides."""
        self._leave()
        self._process.kill()  # it has nothing to finish, and may still be loading torch
        self._process.wait()


def main() -> int:
    """Fork sides until the control socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to act on
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.freeze()  # what is loaded is never collected, so its pages stay shared with the sides
    while True:
        packet, fds, _, _ = socket.recv_fds(control, MAX_PACKET_BYTES, 1)
        if not packet:
            return 0
        side, environment = msgpack.unpackb(packet)
        pid = os.fork()
        if pid == 0:
            control.close()
            _live(fds[0], environment)
        os.close(fds[0])
        pid_fd = os.pidfd_open(pid)  # before anybody waits for it, so that the pid is still its own
        socket.send_fds(control, [msgpack.packb([side, pid])], [pid_fd])
        os.close(pid_fd)
        _bury()


def _live(control_fd: int, environment: Mapping[str, str]) -> None:
    """The forked side's whole life; does not return."""
    status = 1
    try:
        os.environ.update(environment)
        status = side_process.run(socket.socket(fileno=control_fd))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _bury() -> None:
    """Take the exit statuses of sides that have died."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.exit(main())
