"""Fixtures for both ends of a link, which must leave neither threads nor descriptors behind."""

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support.transport_ends import Far, Near, make_far, make_near
from tests.support.waiting import wait_until
from tools.free_ports import free_address


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that a test leaves no thread and no descriptor behind."""
    # The first call reserves a slice of the ports, which this process keeps.
    free_address()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    wait_until(lambda: threading.active_count() <= threads, what="the end of all threads")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, what="the end of all descriptors")


@pytest.fixture
def far(nothing_is_left: None) -> Iterator[Far]:
    made = make_far()
    yield made
    made.receiver.close()


@pytest.fixture
def near_to(nothing_is_left: None) -> Iterator[Callable[..., Near]]:
    made: list[Near] = []

    def make(address: str, **settings: object) -> Near:
        made.append(make_near(address, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for near in made:
        near.link.close()
