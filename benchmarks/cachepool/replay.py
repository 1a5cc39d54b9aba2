"""A trace through the real pool: what each eviction policy hits, in bytes and in prefill that need not be done."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cachepool import trace
from benchmarks.cachepool.layouts import ATTENTION, SLOT_BYTES, STATE, dense, hybrid
from benchmarks.cachepool.trace import BLOCK_TOKENS, MAX_INPUT_TOKENS, Request
from prfaas.cachepool.block_run import BlockIdentity
from prfaas.cachepool.capacity import NO_LIMITS, TenantShares
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.slots import LeaseId
from prfaas.model.cost.profile import PrefillProfile
from prfaas.solve.files import catalog
from prfaas.types import BlockHash
from tests.support.pool_integrity import check_integrity

CAPACITIES = (1_000, 3_000, 10_000, 30_000)  # blocks
_ROOM = 2 * MAX_INPUT_TOKENS // BLOCK_TOKENS  # Transfer slots for the longest request.
CHOSEN = "chosen"
SEED = 1
# What an LRU cache of so many blocks hits on the public trace (arXiv 2407.00079, table 1), in blocks.
PUBLISHED = {"1000": 0.30, "10000": 0.40, "30000": 0.48, "50000": 0.50, "unlimited": 0.51}
_ROOT = BlockHash(bytes(16))


@dataclass
class Savings:
    """Sums over all requests; prefill in seconds of one instance."""

    profile: PrefillProfile
    hit_tokens: int = 0
    total_tokens: int = 0
    seconds: float = 0.0
    total_seconds: float = 0.0

    def add(self, hit_tokens: int, total_tokens: int) -> None:
        self.hit_tokens += hit_tokens
        self.total_tokens += total_tokens
        self.seconds += self.profile.seconds(max(1, total_tokens - hit_tokens), hit_tokens)
        self.total_seconds += self.profile.seconds(total_tokens)

    def ratios(self) -> dict[str, float]:
        return {
            "bytes": round(self.hit_tokens / self.total_tokens, 4),
            "prefill_seconds": round(1 - self.seconds / self.total_seconds, 4),
        }


@dataclass(frozen=True)
class Case:
    """One kind of model, and how long its prefill takes."""

    states: bool
    profile: PrefillProfile


CASES = {
    "dense": Case(False, catalog.find_profile("h200-qwen3-235b").prefill),
    "hybrid": Case(True, catalog.find_profile("h200-internal-1t").prefill),
}
POLICIES = {CHOSEN: TenantShares(learns=True), "lru": NO_LIMITS}


def measure(file: Path | None) -> dict[str, Any]:
    """Share of prompt bytes and of prefill seconds that is saved, per model kind, capacity and policy, beside the bound."""
    requests = trace.generate(SEED) if file is None else trace.read(file)
    return {
        "trace": f"generated, seed {SEED}" if file is None else file.name,
        "num_requests": len(requests),
        "mean_input_tokens": round(sum(request.input_tokens for request in requests) / len(requests)),
        "published_lru_block_hit_ratio": PUBLISHED,
        "bar": "the chosen policy saves at least what lru saves",
        "saved_ratio": {
            name: {str(capacity): _compare(requests, capacity, case) for capacity in CAPACITIES}
            | {"unlimited": replay(requests, 1_000_000, case, "lru").ratios()}
            for name, case in CASES.items()
        },
    }


def _compare(requests: Sequence[Request], capacity: int, case: Case) -> dict[str, Any]:
    found = {name: replay(requests, capacity, case, name).ratios() for name in POLICIES}
    bound = clairvoyant(requests, capacity, case.profile).ratios()
    gap = {unit: round(bound[unit] - found[CHOSEN][unit], 4) for unit in bound}
    meets = all(found[CHOSEN][unit] >= found["lru"][unit] for unit in bound)
    name = "clairvoyant_without_states" if case.states else "clairvoyant"
    return {**found, name: bound, "gap_to_the_bound": gap, "meets_the_bar": meets}


def replay(requests: Iterable[Request], capacity: int, case: Case, policy: str) -> Savings:
    """Return all requests through a pool of `capacity` prefix slots; with states a hit needs a state at its very end."""
    ratio = _ROOM / (capacity + _ROOM)
    pool = Pool((capacity + _ROOM) * SLOT_BYTES, transfer_ratio=ratio, shares=POLICIES[policy])
    node = _Node(pool, states=case.states)
    savings = Savings(case.profile)
    for request in requests:
        savings.add(node.serve(request) * BLOCK_TOKENS, request.input_tokens)
    check_integrity(pool)
    pool.close()
    return savings


class _Node:
    def __init__(self, pool: Pool, *, states: bool) -> None:
        self._pool = pool
        self._states = states
        self._arena = pool.arena(hybrid(BLOCK_TOKENS) if states else dense(BLOCK_TOKENS))

    def serve(self, request: Request) -> int:
        """Blocks of the prompt that need not be computed; afterwards the request's own blocks are in the pool."""
        hashes = [BlockHash(block.to_bytes(16, "big")) for block in request.stored]
        found = self._pool.find_all(self._arena, ATTENTION, hashes)
        num_held = next((i for i, slot in enumerate(found) if slot is None), len(found))
        num_hit = self._usable(hashes, min(num_held, len(request.blocks)))
        lease = self._pool.open_lease()
        held = [slot for slot in found[:num_held] if slot is not None]
        self._pool.pin(self._arena, held[:num_hit], lease)
        if self._states and num_hit:
            self._pin_state(hashes[num_hit - 1], lease)
        self._store(hashes, num_held, lease)
        self._pool.end_lease(lease)
        return num_hit

    def _usable(self, hashes: list[BlockHash], num_blocks: int) -> int:
        if not self._states:
            return num_blocks
        ends = range(num_blocks, 0, -1)
        return next((n for n in ends if self._pool.find(self._arena, STATE, hashes[n - 1]) is not None), 0)

    def _pin_state(self, block_hash: BlockHash, lease: LeaseId) -> None:
        slot = self._pool.find(self._arena, STATE, block_hash)
        assert slot is not None
        self._pool.pin(self._arena, [slot], lease)

    def _store(self, hashes: list[BlockHash], num_held: int, lease: LeaseId) -> None:
        lengths = range(BLOCK_TOKENS, BLOCK_TOKENS * len(hashes) + 1, BLOCK_TOKENS)
        run = self._pool.allocate(self._arena, 0, len(hashes) - num_held, lease)
        assert run is not None
        if run:
            self._pool.publish_run(
                self._arena,
                run,
                group=ATTENTION,
                hashes=hashes[num_held:],
                parent=hashes[num_held - 1] if num_held else _ROOT,
                num_tokens=lengths[num_held],
            )
        if self._states and self._pool.find(self._arena, ATTENTION, hashes[-1]) is not None:
            slots = self._pool.allocate(self._arena, 0, 1, lease)
            assert slots is not None
            self._pool.publish(
                self._arena, slots[0], BlockIdentity(STATE, hashes[-1], hashes[-1], lengths[-1], hashes[-1])
            )


def clairvoyant(requests: Sequence[Request], capacity: int, profile: PrefillProfile) -> Savings:
    """Nobody who may keep blocks but not states does better: what is asked for last (or never) leaves first (Belady).

    Of blocks that are asked for next by the same request the deepest leaves first, since it is no hit without the others.
    """
    uses: dict[int, list[int]] = {}
    for position in range(len(requests) - 1, -1, -1):
        for block in requests[position].blocks:
            uses.setdefault(block, []).append(position)  # The next use is last.
    held: set[int] = set()
    farthest: list[tuple[int, int, int]] = []  # (minus the next use, minus the depth, block)
    savings = Savings(profile)
    for request in requests:
        num_hit = next((i for i, block in enumerate(request.blocks) if block not in held), len(request.blocks))
        savings.add(num_hit * BLOCK_TOKENS, request.input_tokens)
        for block in request.blocks:
            uses[block].pop()
        kept = [(depth, block) for depth, block in enumerate(request.stored) if uses.get(block)]
        held.difference_update(request.stored)
        held.update(block for _, block in kept)
        for depth, block in kept:
            heapq.heappush(farthest, (-uses[block][-1], -depth, block))
        while len(held) > capacity:
            next_use, _, block = heapq.heappop(farthest)
            if block in held and uses[block][-1] == -next_use:
                held.discard(block)
    return savings
