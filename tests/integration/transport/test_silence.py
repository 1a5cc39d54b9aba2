"""Silent links and frozen peers: packets vanish, or a process stops, and no connection is reset."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from tests.support.end_processes import EndProcess
from tests.support.paused_process import paused
from tools.wan import FAR, Wan, WanShape, obstacle

SILENCE_SECONDS = 2.0  # Of both ends.
NOTICE_SECONDS = 5.0  # For checks, round trips and a busy machine. The kernel would notice after minutes.
RECOVERY_SECONDS = 12.0  # From the end of the silence to the end of the next transfer.
BYTES_PER_SECOND = 64e6  # So that a transfer lasts.
SHAPE = WanShape(100e6, 0.020)
DURATIONS = [5.0, pytest.param(30.0, marks=pytest.mark.soak)]


@pytest.fixture
def ends() -> Iterator[tuple[EndProcess, EndProcess]]:
    """Provide a busy sender and its receiver on loopback."""
    with ExitStack() as stack:
        far = stack.enter_context(closing(EndProcess("receive", "127.0.0.1:0", SILENCE_SECONDS)))
        near = stack.enter_context(closing(EndProcess("send", far.line(), 128, SILENCE_SECONDS, BYTES_PER_SECOND)))
        near.next("completed")
        near.next("sending")
        yield near, far


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)  # Duration of the fault.


@pytest.mark.parametrize("seconds", DURATIONS)
@pytest.mark.parametrize("frozen", ["sender", "receiver"])
def test_frozen_end_fails_the_transfer_of_its_peer_within_the_silence(
    ends: tuple[EndProcess, EndProcess], frozen: str, seconds: float
) -> None:
    near, far = ends
    stopped, peer = (near, far) if frozen == "sender" else (far, near)
    with paused(stopped.process.pid):
        began = time.monotonic()
        failed_seconds = peer.next("unreachable") - began
        assert SILENCE_SECONDS / 4 < failed_seconds < SILENCE_SECONDS + NOTICE_SECONDS
        _wait(began + seconds - time.monotonic())
    began = time.monotonic()
    assert peer.next("completed") - began < RECOVERY_SECONDS


@pytest.mark.root
@pytest.mark.parametrize("seconds", DURATIONS)
def test_silent_link_fails_transfers_at_both_ends_within_the_silence(seconds: float) -> None:
    if reason := obstacle():
        pytest.skip(f"an emulated link {reason}")
    with Wan(SHAPE) as wan, ExitStack() as stack:
        far = stack.enter_context(closing(EndProcess("receive", f"{FAR}:0", SILENCE_SECONDS, run=wan.far)))
        near = stack.enter_context(
            closing(EndProcess("send", far.line(), 8, SILENCE_SECONDS, BYTES_PER_SECOND, run=wan.near))
        )
        near.next("completed")
        near.next("sending")
        wan.set(replace(SHAPE, loss=1.0))
        began = time.monotonic()
        failed_seconds = [end.next("unreachable") - began for end in (near, far)]
        assert all(found < SILENCE_SECONDS + NOTICE_SECONDS for found in failed_seconds), failed_seconds
        _wait(began + seconds - time.monotonic())
        wan.set(SHAPE)
        began = time.monotonic()
        assert near.next("completed") - began < RECOVERY_SECONDS
