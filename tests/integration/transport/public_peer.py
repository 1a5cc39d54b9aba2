"""Receiver at a private address with a peer at a public one, for a network namespace that has both addresses."""

import contextlib
import json
import socket
import sys

from tests.support.transport_ends import make_far
from tests.support.waiting import PATIENCE_SECONDS, wait_until

if __name__ == "__main__":
    far = make_far(insecure_plaintext=json.loads(sys.argv[2]))
    host, port = far.address.split(":")
    with contextlib.ExitStack() as peers:
        for _ in range(2):
            bound = (sys.argv[1], 0)
            peers.enter_context(socket.create_connection((host, int(port)), PATIENCE_SECONDS, source_address=bound))
        wait_until(lambda: sum(far.receiver.refused.values()) + far.receiver.num_connections == 2)
        sys.stdout.write(json.dumps(far.receiver.refused))
    far.receiver.close()
