"""Fork server for the prefill and decode processes. It has torch loaded, so a restart takes milliseconds.

    python -m prfaas.colocate.processes.forkserver CONTROL_FD

It runs no threads, so that forks may start some. A packet on the control socket requests a side and carries the
side's control socket. The answer carries a pidfd, which reports the death of a process that is not a child.
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
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from prfaas import logs
from prfaas.colocate.processes import side as side_process
from prfaas.colocate.processes.shared_memory import Side

log = logs.get("colocate.forkserver")

MAX_PACKET_BYTES = 1 << 16


@dataclass(frozen=True)
class StartedSide:
    """Running side. The receiver owns the pidfd."""

    side: Side
    pid: int
    pid_fd: int


class ForkServer:
    """Client of the fork server, on the running event loop.

    `died` gets the sides whose start was lost; it may `open` a new server.
    """

    def __init__(self, started: Callable[[StartedSide], None], died: Callable[[list[Side]], None]) -> None:
        self._started, self._died = started, died
        self._loop = asyncio.get_running_loop()
        self._awaited: list[Side] = []
        self.open()

    def open(self) -> None:
        """Start the server process."""
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "prfaas.colocate.processes.forkserver", str(server_end.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[server_end.fileno()])
        server_end.close()
        self._loop.add_reader(self._control.fileno(), self._on_packet)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, side: Side, control: socket.socket) -> None:
        """Request a side. `control` is the side's end of the control socket and is closed here."""
        self._awaited.append(side)
        with control:
            try:
                socket.send_fds(self._control, [msgpack.packb(side)], [control.fileno()])
            except OSError:
                pass  # The server has died; `_on_packet` handles that.

    def _on_packet(self) -> None:
        packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
        if not packet:
            self._on_death()
            return
        side, pid = msgpack.unpackb(packet)
        self._awaited.remove(side)
        self._started(StartedSide(side, pid, fds[0]))

    def _on_death(self) -> None:
        log.warning("forkserver.exited", pid=self.pid)
        self._leave()
        self._process.wait()
        lost, self._awaited = self._awaited, []
        self._died(lost)

    def _leave(self) -> None:
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()

    def close(self) -> None:
        """End the fork server, but not the sides."""
        self._leave()
        self._process.kill()  # It has nothing to finish and may still be loading torch.
        self._process.wait()


def main() -> int:
    """Fork sides until the control socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The supervisor handles Ctrl-C.
    control = socket.socket(fileno=int(sys.argv[1]))
    # Loaded objects are never collected, so that their pages stay shared with the sides.
    gc.freeze()
    while True:
        packet, fds, _, _ = socket.recv_fds(control, MAX_PACKET_BYTES, 1)
        if not packet:
            return 0
        side = msgpack.unpackb(packet)
        pid = os.fork()
        if pid == 0:
            control.close()
            _run_side(fds[0])
        os.close(fds[0])
        pid_fd = os.pidfd_open(pid)  # Before any wait, so that the pid is not reused.
        socket.send_fds(control, [msgpack.packb([side, pid])], [pid_fd])
        os.close(pid_fd)
        _reap()


def _run_side(control_fd: int) -> None:
    """Run a forked side and exit."""
    status = 1
    try:
        status = side_process.run(socket.socket(fileno=control_fd))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _reap() -> None:
    """Collect the exit statuses of dead sides."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.exit(main())
