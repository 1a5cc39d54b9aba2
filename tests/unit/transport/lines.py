"""Lines whose connections end in this process."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import cast

from prfaas.transport.connection import Connection
from prfaas.transport.line import Line, Work
from prfaas.transport.packing import CODECS


@contextlib.contextmanager
def two_lines(work: Work | None = None, *, generation: int = 0) -> Iterator[tuple[Line, Line]]:
    """Nobody runs them; without `work` nobody may."""
    with contextlib.ExitStack() as stack:
        made = []
        for end in socket.socketpair():
            connection = stack.enter_context(contextlib.closing(Connection(end, state="sending")))
            made.append(Line(cast(Work, work), connection, generation=generation, capabilities=CODECS))
        yield made[0], made[1]
