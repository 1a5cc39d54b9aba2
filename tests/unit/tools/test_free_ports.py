"""Uniqueness of free addresses within and across processes."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tools.free_ports import SLICE_PORTS, free_address

PRINT = "from tools.free_ports import free_address; print(*(free_address() for _ in range(20)), flush=True); input()"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_no_address_is_returned_twice_before_the_slice_is_used_up() -> None:
    with ThreadPoolExecutor(4) as threads:
        given = list(threads.map(lambda _: free_address(), range(SLICE_PORTS // 2)))
    assert len(set(given)) == len(given)


def test_address_in_use_is_skipped() -> None:
    taken = free_address()
    with socket.create_server(("127.0.0.1", _port(taken))):
        assert taken not in {free_address() for _ in range(SLICE_PORTS)}


def test_concurrent_processes_share_no_address() -> None:
    asked = [
        subprocess.Popen([sys.executable, "-c", PRINT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    given = [process.stdout.readline().split() for process in asked if process.stdout is not None]
    for process in asked:
        process.communicate("\n")
    assert len({address for addresses in given for address in addresses}) == 60
