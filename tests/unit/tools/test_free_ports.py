"""No two programs that are about to start are told the same address."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tools.free_ports import FIRST_PORT, KERNELS_FIRST_PORT, SLICE_PORTS, free_address

PRINT = "from tools.free_ports import free_address; print(*(free_address() for _ in range(20)), flush=True); input()"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_no_address_is_given_twice_before_all_of_a_slice_have_been() -> None:
    with ThreadPoolExecutor(4) as threads:
        given = list(threads.map(lambda _: free_address(), range(SLICE_PORTS // 2)))
    assert len(set(given)) == len(given)


def test_the_kernel_gives_none_of_them_to_somebody_else() -> None:
    assert all(FIRST_PORT < _port(free_address()) < KERNELS_FIRST_PORT for _ in range(20))


def test_an_address_that_somebody_listens_at_is_passed_over() -> None:
    taken = free_address()
    with socket.create_server(("127.0.0.1", _port(taken))):
        assert taken not in {free_address() for _ in range(SLICE_PORTS)}


def test_processes_that_live_at_the_same_time_have_no_address_in_common() -> None:
    asked = [
        subprocess.Popen([sys.executable, "-c", PRINT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    given = [process.stdout.readline().split() for process in asked if process.stdout is not None]
    for process in asked:
        process.communicate("\n")
    assert len({address for its in given for address in its}) == 60
