"""An executor's blocks without its sides: known content in them, a real pool beside, and what that has answered."""

from __future__ import annotations

from pathlib import Path

import torch

from prfaas.colocate.front import Blocks
from prfaas.colocate.model import cache
from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.model.shape import TINY
from prfaas.colocate.pool import Answers, Pool, PoolSettings
from tests.support.waiting import PATIENCE_SECONDS, until

SHAPE = CacheShape(num_blocks=33, block_tokens=16, num_state_slots=9)
POISON = 1e30
OURS, OTHERS = Blocks(3, (4, 9, 2, 7)), Blocks(5, (11, 12, 20, 21))


class Executor:
    """Blocks of known content, and what the pool has answered."""

    def __init__(self, socket: Path, device: str = "cpu") -> None:
        kv = torch.rand(cache.kv_elements(TINY, SHAPE), dtype=torch.float64, device=device)
        states = torch.rand(cache.state_elements(TINY, SHAPE), dtype=torch.float64, device=device)
        self.cache = cache.view(TINY, SHAPE, kv, states)
        self.loaded: dict[int, int] = {}
        self.freed: list[int] = []
        self.num_failures = 0
        settings = PoolSettings(
            socket, "executor", "model", "weights", reuse_min_tokens=16, silence_seconds=PATIENCE_SECONDS
        )
        self.pool = Pool(settings, self.cache)
        self.pool.start(Answers(self.loaded.__setitem__, self.freed.append, self._fail))

    def _fail(self) -> None:
        self.num_failures += 1

    async def begin(self, number: int, prompt: tuple[int, ...]) -> int:
        """Open and begin a request; the tokens that can be loaded."""
        visit = await self.pool.open(prompt, {})
        self.pool.begin(number, visit)
        return visit.num_cached

    async def leave(self, number: int, tokens: tuple[int, ...], blocks: Blocks) -> None:
        await self.begin(number, tokens)
        self.pool.leave(number, tokens, blocks)
        await until(lambda: number in self.freed, what="free blocks")

    def content(self, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.kv[:, :, list(blocks.blocks)].clone(), self.cache.states[:, blocks.slot].clone()

    def poison(self, blocks: Blocks) -> None:
        self.cache.kv[:, :, list(blocks.blocks)] = POISON
        self.cache.states[:, blocks.slot] = POISON


def tokens_of(seed: int, num_tokens: int = 55) -> tuple[int, ...]:
    return tuple((seed * 100 + 3 * i) % 320 for i in range(num_tokens))
