"""The kernel's figures of a connection, over an emulated link with and without losses."""

import subprocess
import sys

import pytest

from tools.wan import FAR, Wan, WanShape, obstacle

pytestmark = pytest.mark.root
NUM_BYTES = 1 << 20
FAR_END = f"""
import socket
listener = socket.create_server(("{FAR}", 0))
listener.settimeout(60)
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
while connection.recv(1 << 16):
    pass
"""
NEAR_END = f"""
import select, socket, sys
from prfaas.transport.net.sockets import read_tcp_info
connection = socket.create_connection(("{FAR}", int(sys.argv[1])))
connection.setblocking(False)
most, left, writable = 0, {NUM_BYTES}, select.poll()
writable.register(connection, select.POLLOUT)
info = read_tcp_info(connection)
while info.delivered_segments * info.segment_bytes < {NUM_BYTES} and not most:
    if left and writable.poll(1):
        left -= connection.send(bytes(min(left, 1 << 14)))
    info = read_tcp_info(connection)
    most = max(most, info.out_of_order_bytes)
print(most)
"""


def _out_of_order_bytes(loss: float) -> int:
    """Return the first out-of-order bytes seen at the peer, or 0."""
    if reason := obstacle():
        pytest.skip(f"an emulated link {reason}")
    with Wan(WanShape(1e8, 0.05, loss)) as wan, wan.far([sys.executable, "-c", FAR_END], stdout=subprocess.PIPE) as far:
        assert far.stdout is not None
        near = [*wan.inside("near"), sys.executable, "-c", NEAR_END, far.stdout.readline()]
        run = subprocess.run(near, stdout=subprocess.PIPE, text=True)
        far.kill()
    run.check_returncode()
    return int(run.stdout)


def test_bytes_behind_a_lost_segment_are_known() -> None:
    assert _out_of_order_bytes(loss=0.0) == 0
    assert 0 < _out_of_order_bytes(loss=0.05) < NUM_BYTES
