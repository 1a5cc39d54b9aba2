"""A receiving end as a process of its own, which tests may kill or stop.

It prints its address, and then the digest of each transfer that is whole.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import xxhash

from prfaas.transport.receiver.api import ReceiveCompleted
from tests.integration.transport.ends import Far, make_far
from tests.support.waiting import wait_until


def start(address: str) -> subprocess.Popen[str]:
    """Such a process; it ends with its standard input."""
    command = [sys.executable, "-m", "tests.integration.transport.far_process", address]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def next_line(far: subprocess.Popen[str]) -> str:
    """What it says next."""
    assert far.stdout is not None
    return far.stdout.readline().strip()


def digest_of(objects: list[bytes] | list[bytearray]) -> str:
    state = xxhash.xxh3_64()
    for its in objects:
        state.update(its)
    return state.hexdigest()


def _say_whole_ones(far: Far) -> None:
    said = 0
    while True:
        wait_until(lambda said=said: len(far.of(ReceiveCompleted)) > said, seconds=3600)  # type: ignore[misc]
        transfer_id = far.of(ReceiveCompleted)[said].transfer_id
        _say(f"{transfer_id.hex()} {digest_of(far.memory.pop(transfer_id))}")
        said += 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    receiving = make_far(listen=sys.argv[1])
    _say(receiving.address)
    threading.Thread(target=_say_whole_ones, args=(receiving,), daemon=True).start()
    sys.stdin.read()  # until the test goes
