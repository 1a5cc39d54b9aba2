"""Ends of a link as processes, which print what becomes of each transfer, with the monotonic time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.receiver.api import ReceiveCompleted, ReceiveFailed
from prfaas.transport.sender.api import SendCompleted, SendFailed
from tests.support.transport_ends import make_far, make_near, objects_of, send
from tests.support.waiting import wait_until

BYTES_PER_SECOND = 64e6  # So that a transfer lasts.
Run = Callable[..., subprocess.Popen[str]]


class TimedEnd:
    """One end, run by `run` (such as `subprocess.Popen`). A sender gets the address of a receiver."""

    def __init__(self, run: Run, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.support.timed_ends", *arguments]
        self.process = run(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def line(self) -> str:
        """Return the next line that the end prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def next(self, what: str) -> float:
        """Skip lines until an outcome, such as `unreachable`, and return its time."""
        while True:
            outcome, _, at = self.line().partition(" ")
            assert at, "the end has ended"
            if outcome == what:
                return float(at)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def _print(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def _print_new(events: Sequence[Any], count: int) -> int:
    """Print the outcomes among the events after the first `count`. Returns the number of all events."""
    for event in events[count : (total := len(events))]:
        if isinstance(event, SendCompleted | ReceiveCompleted):
            _print("completed", time.monotonic())
        elif isinstance(event, SendFailed | ReceiveFailed):
            _print(event.reason, time.monotonic())
    return total


def _receive(listen: str) -> None:
    far, count = make_far(listen=listen, silence_seconds=2.0), 0
    _print(far.address)
    while True:
        count = _print_new(far.events, count)
        time.sleep(0.01)


def _send(address: str, num_mib: int) -> None:
    near = make_near(address, silence_seconds=2.0, budgets=(RateBudget(BYTES_PER_SECOND),))
    objects = objects_of(*[1 << 20] * num_mib)
    while True:
        transfer_id = send(near, objects, deadline=600.0)
        wait_until(lambda: any(near.acknowledged()) or not near.link.snapshot().num_transfers, seconds=600.0)
        _print("sending", time.monotonic())
        near.end(transfer_id, seconds=600.0)
        _print_new(near.events, 0)
        near.events.clear()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _receive(sys.argv[1])
    _send(sys.argv[1], int(sys.argv[2]))
