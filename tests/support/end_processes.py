"""Ends of a link as processes, which print what becomes of each transfer: outcome, monotonic time, id and digest.

receive ADDRESS SILENCE_SECONDS    prints its address first
send ADDRESS MIB SILENCE_SECONDS [BYTES_PER_SECOND]    prints "sending" once a transfer is under way, and goes on for ever
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import xxhash

from prfaas.transport.congestion.rate_budget import RateBudget
from prfaas.transport.receiver.api import ReceiveCompleted, ReceiveFailed
from prfaas.transport.sender.api import SendCompleted
from tests.support.transport_ends import make_far, make_near, objects_of, send
from tests.support.waiting import wait_until

Run = Callable[..., subprocess.Popen[str]]
LOCAL: Run = partial(subprocess.Popen, text=True)


class EndProcess:
    """One end, which ends with this process."""

    def __init__(self, *arguments: object, run: Run = LOCAL) -> None:
        command = [sys.executable, "-m", "tests.support.end_processes", *map(str, arguments)]
        self.process = run(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def line(self) -> str:
        """Return the next line that the end prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def next(self, what: str) -> float:
        """Skip lines until an outcome, such as `unreachable`, and return its time."""
        while words := self.line().split():
            if words[0] == what:
                return float(words[1])
        raise AssertionError("the end has ended")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def digest_of(objects: Sequence[bytes | bytearray]) -> str:
    state = xxhash.xxh3_64()
    for content in objects:
        state.update(content)
    return state.hexdigest()


def _print(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def _receive(listen: str, silence_seconds: str) -> None:
    far, num_printed = make_far(listen=listen, silence_seconds=float(silence_seconds)), 0
    _print(far.address)
    while True:
        for event in far.events[num_printed : (num_printed := len(far.events))]:
            if isinstance(event, ReceiveCompleted):
                transfer_id = event.transfer_id
                _print("completed", time.monotonic(), transfer_id.hex(), digest_of(far.memory.pop(transfer_id)))
            elif isinstance(event, ReceiveFailed):
                _print(event.reason, time.monotonic())
        time.sleep(0.01)


def _send(address: str, num_mib: str, silence_seconds: str, bytes_per_second: str = "inf") -> None:
    budgets = (RateBudget(float(bytes_per_second)),) if bytes_per_second != "inf" else ()
    near = make_near(address, silence_seconds=float(silence_seconds), budgets=budgets)
    objects = objects_of(*[1 << 20] * int(num_mib))
    while True:
        transfer_id = send(near, objects, deadline=600.0)
        wait_until(lambda: any(near.acknowledged()) or not near.link.snapshot().num_transfers, seconds=600.0)
        _print("sending", time.monotonic())
        event: Any = near.end(transfer_id, seconds=600.0)
        _print("completed" if isinstance(event, SendCompleted) else event.reason, time.monotonic())
        near.events.clear()


def _end_with_the_test() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_test, daemon=True).start()
    if sys.argv[1] == "receive":
        _receive(*sys.argv[2:])
    _send(*sys.argv[2:])
