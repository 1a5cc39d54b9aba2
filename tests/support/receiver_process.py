"""Receiver as a process of its own, which tests may kill or stop.

The process prints its address, and then the digest of each completed transfer.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import xxhash

from prfaas.transport.receiver.api import ReceiveCompleted
from tests.support.transport_ends import Far, make_far
from tests.support.waiting import wait_until


def start(address: str) -> subprocess.Popen[str]:
    """Start a receiver, which ends with its standard input."""
    command = [sys.executable, "-m", "tests.support.receiver_process", address]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def next_line(far: subprocess.Popen[str]) -> str:
    """Return the next line that the receiver prints."""
    assert far.stdout is not None
    return far.stdout.readline().strip()


def digest_of(objects: list[bytes] | list[bytearray]) -> str:
    state = xxhash.xxh3_64()
    for content in objects:
        state.update(content)
    return state.hexdigest()


def _print_completed(far: Far) -> None:
    num_printed = 0
    while True:
        wait_until(lambda count=num_printed: len(far.of(ReceiveCompleted)) > count, seconds=3600)  # type: ignore[misc]
        transfer_id = far.of(ReceiveCompleted)[num_printed].transfer_id
        _print(f"{transfer_id.hex()} {digest_of(far.memory.pop(transfer_id))}")
        num_printed += 1


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    receiving = make_far(listen=sys.argv[1])
    _print(receiving.address)
    threading.Thread(target=_print_completed, args=(receiving,), daemon=True).start()
    sys.stdin.read()  # Returns when the test ends.
