"""A sending end as a process of its own, which tests may kill: it sends one transfer after another until it is."""

from __future__ import annotations

import sys

from tests.integration.transport.ends import make_near, objects_of, send

if __name__ == "__main__":
    near = make_near(sys.argv[1])
    while True:
        near.end(send(near, objects_of(*[1 << 20] * 6)))
