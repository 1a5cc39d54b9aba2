"""A keeper of blocks without an agent: copies real keys, values and states, one copy whenever it is turned."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from prfaas.colocate.front import Blocks, Front
from prfaas.colocate.model.cache import Cache


@dataclass(frozen=True)
class Copy:
    """To make: out of the blocks where `left` are the tokens that they hold, into them where it is None."""

    request: int
    blocks: Blocks
    left: tuple[int, ...] | None


class Shelf:
    """A `BlockKeeper`; `front` is set by who makes both."""

    front: Front

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._kept: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._wanted: dict[int, tuple[int, ...]] = {}
        self._todo: deque[Copy] = deque()
        self.num_loaded = 0

    def longest(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Return the longest kept prefix of a prompt that leaves a token to compute."""
        usable = [tokens for tokens in self._kept if len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens]
        return max(usable, key=len, default=())

    def expect(self, request: int, prefix: tuple[int, ...]) -> None:
        """Set what `load` returns for a request."""
        self._wanted[request] = prefix

    def load(self, request: int, blocks: Blocks) -> None:
        self._todo.append(Copy(request, blocks, None))

    def leave(self, request: int, tokens: tuple[int, ...], blocks: Blocks) -> None:
        self._todo.append(Copy(request, blocks, tokens))

    def decode_lost(self) -> None:
        self._todo.clear()

    def turn(self) -> bool:
        """Make the oldest copy; False when there is none."""
        if not self._todo:
            return False
        item = self._todo.popleft()
        ids, slot = list(item.blocks.blocks), item.blocks.slot
        if item.left is not None:
            self._kept[item.left] = self._cache.kv[:, :, ids].clone(), self._cache.states[:, slot].clone()
            self.front.free(item.request)
            return True
        prefix = self._wanted[item.request]
        kv, state = self._kept[prefix]
        number = min(kv.shape[2], len(ids))
        self._cache.kv[:, :, ids[:number]], self._cache.states[:, slot] = kv[:, :, :number], state
        self.num_loaded += 1
        self.front.loaded(item.request, len(prefix))
        return True
