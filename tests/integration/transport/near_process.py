"""A sending end as a process of its own, which tests may kill: it sends so many MiB after each other until it is."""

from __future__ import annotations

import sys

from tests.integration.transport.ends import make_near, objects_of, send

if __name__ == "__main__":
    address, num_objects = sys.argv[1], int(sys.argv[2])
    near = make_near(address)
    while True:
        near.end(send(near, objects_of(*[1 << 20] * num_objects)))
