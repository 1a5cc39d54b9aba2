"""Calls that are made on the agent's loop one at each of its turns: what its sockets bring is heard between two of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class OneATurn(Generic[P]):
    """Calls a function as often as it is asked to, in that order."""

    def __init__(self, call: Callable[P, None]) -> None:
        self._call = call
        self._waiting: deque[Callable[[], None]] = deque()

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> None:
        """On the loop."""
        self._waiting.append(lambda: self._call(*arguments, **named))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        try:
            self._waiting[0]()
        finally:
            del self._waiting[0]
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._next)
