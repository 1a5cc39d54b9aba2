"""Sender as a process of its own, which sends transfers of so many MiB until a test kills it."""

from __future__ import annotations

import sys

from tests.support.transport_ends import make_near, objects_of, send

if __name__ == "__main__":
    address, num_objects = sys.argv[1], int(sys.argv[2])
    near = make_near(address)
    while True:
        near.end(send(near, objects_of(*[1 << 20] * num_objects)))
