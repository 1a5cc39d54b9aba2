"""Capacity for prefix blocks: limits per tenant and for blocks on probation, and the order in which blocks leave."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from prfaas.cachepool.block_run import BlockRun
from prfaas.hashing import NO_HASH, root_hash
from prfaas.types import BlockHash

MAX_ACCOUNTS = 1024  # From here on, tenants that hold nothing are forgotten when another tenant comes.
ALL = ""  # The view of every candidate.
PROBATION = "probation"  # The view of runs whose tail nobody has read since it was stored.
MIN_PROBATION_SHARE = 1 / 16
MAX_REMEMBERED = 1 << 18  # Hashes of about 150 bytes each; fewer if the capacity has fewer blocks.


class Candidates:
    """Runs whose tail may leave, least recently used first.

    Each run stands in the view of all and in the views that it was added to. A view is a heap with stale entries:
    discarding a run forgets its serial number, and the heap drops the entry later. Every operation costs O(log n) a view.
    """

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[int, int, BlockRun]]] = {ALL: []}  # (last use, serial, run)
        self._serials: dict[BlockRun, int] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._serials)

    def __contains__(self, run: BlockRun) -> bool:
        return run in self._serials

    def add(self, run: BlockRun, last_used: int, *, views: Iterable[str] = ()) -> None:
        """Add a run, or change the last use of a run that is there. A use is a count, not a time."""
        self._next_serial += 1
        self._serials[run] = self._next_serial
        for view in (ALL, *views):
            heap = self._heaps.setdefault(view, [])
            heapq.heappush(heap, (last_used, self._next_serial, run))
            if len(heap) > 2 * len(self._serials) + 64:
                live = [entry for entry in heap if self._serials.get(entry[2]) == entry[1]]
                heapq.heapify(live)
                self._heaps[view] = live

    def discard(self, run: BlockRun) -> None:
        """Remove a run whose tail may not leave for now."""
        self._serials.pop(run, None)

    def pop(self, view: str = ALL) -> BlockRun | None:
        """Remove and return the first run of a view, or None when nothing may leave."""
        heap = self._heaps.get(view, [])
        while heap:
            _, serial, run = heapq.heappop(heap)
            if self._serials.get(run) == serial:
                del self._serials[run]
                return run
        return None

    def drop_view(self, view: str) -> None:
        """Forget a view that has no live runs left."""
        self._heaps.pop(view, None)


@dataclass(frozen=True)
class TenantShares:
    """Shares of the capacity, from 0 to 1: by the salt of some tenants, and for each other tenant.

    With `learns`, the share of blocks on probation is learned; without, they have no limit.
    """

    learns: bool = False
    each_tenant: float = 1.0
    of_tenants: Mapping[str, float] = field(default_factory=dict)


NO_LIMITS = TenantShares()


@dataclass(eq=False)
class TenantAccount:
    """Bytes of one tenant's prefix blocks. Only a tenant with a limit has a view of its own."""

    name: str
    limit_bytes: int | None
    used_bytes: int = 0

    @property
    def view(self) -> str:
        """Name of the tenant's view of the candidates."""
        return f"tenant {self.name}"


class Shortage(NamedTuple):
    """Bytes that must leave, from runs of this view."""

    num_bytes: int
    view: str


class Capacity:
    """Counts of prefix bytes, kept by the pool through `add_blocks` and `remove_blocks`.

    Three limits apply, in this order: the tenant's, the probation's, and the whole budget.
    """

    def __init__(self, budget_bytes: int, shares: TenantShares) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.probation = Probation(budget_bytes, learns=shares.learns)
        self.candidates = Candidates()
        self._shares = shares
        self._unlimited = TenantAccount("", None)
        self._by_name: dict[str, TenantAccount] = {}  # Accounts with a limit.
        self._names: dict[str, dict[BlockHash, str]] = {}  # By model: tenants with a share of their own, by root hash.

    def account(self, model: str, root: BlockHash) -> TenantAccount:
        """Return the account of the tenant whose prompts of this model begin at that root."""
        if model not in self._names:
            self._names[model] = {root_hash(model, name.encode()): name for name in self._shares.of_tenants}
        own_name = self._names[model].get(root)
        if own_name is None and (self._shares.each_tenant >= 1 or root == NO_HASH):
            return self._unlimited
        name = root.hex() if own_name is None else own_name
        account = self._by_name.get(name)
        if account is None:
            if len(self._by_name) >= MAX_ACCOUNTS:
                for empty in [account for account in self._by_name.values() if not account.used_bytes]:
                    self.candidates.drop_view(self._by_name.pop(empty.name).view)
            share = self._shares.each_tenant if own_name is None else self._shares.of_tenants[own_name]
            account = self._by_name[name] = TenantAccount(name, int(self.budget_bytes * share))
        return account

    def tenant_bytes(self) -> dict[str, int]:
        """Return the bytes of each tenant with a limit. Any thread may call this."""
        return {account.name: account.used_bytes for account in list(self._by_name.values())}

    def shortage(self, account: TenantAccount, num_bytes: int) -> Shortage | None:
        """Return what must leave first so that new blocks of a tenant fit, or None if they fit."""
        if account.limit_bytes is not None and (excess := account.used_bytes + num_bytes - account.limit_bytes) > 0:
            return Shortage(excess, account.view)
        lacking = self.used_bytes + num_bytes - self.budget_bytes
        if lacking <= 0:
            return None
        excess = self.probation.used_bytes + num_bytes - self.probation.limit_bytes
        if self.probation.learns and excess > 0:
            return Shortage(min(lacking, excess), PROBATION)
        return Shortage(lacking, ALL)

    def victim(self, view: str) -> BlockRun | None:
        """Return the run whose tail leaves.

        If all blocks on probation are in use, any run may leave: a prompt that is being stored is worth more whole.
        """
        found = self.candidates.pop(view)
        return self.candidates.pop() if found is None and view == PROBATION else found

    def add_blocks(self, account: TenantAccount, hashes: Sequence[BlockHash], slot_bytes: int) -> None:
        """Count blocks of one chain that were stored."""
        account.used_bytes += len(hashes) * slot_bytes
        self.used_bytes += len(hashes) * slot_bytes
        self.probation.add(hashes, slot_bytes)

    def remove_blocks(
        self, account: TenantAccount, hashes: Sequence[BlockHash], slot_bytes: int, *, num_unread: int
    ) -> None:
        """Count blocks that left from a chain's tail, the first `num_unread` of which nobody had read."""
        account.used_bytes -= len(hashes) * slot_bytes
        self.used_bytes -= len(hashes) * slot_bytes
        self.probation.remove(hashes, num_unread, slot_bytes)

    def views(self, account: TenantAccount, run: BlockRun) -> list[str]:
        """Return the views of a run, apart from the view of all."""
        views = [] if account.limit_bytes is None else [account.view]
        if self.probation.learns and run.num_read < len(run):
            views.append(PROBATION)
        return views


class Probation:
    """Room for blocks that nobody has read since they were stored.

    Most blocks are never read again and must not drive out blocks that are. Too small a share loses blocks before
    their second request. So the share is learned, after ARC (Megiddo and Modha, FAST '03): the hashes of evicted
    blocks are remembered, and a block that is stored again tells on which side it was missed.
    """

    def __init__(self, capacity_bytes: int, *, learns: bool) -> None:
        self.learns = learns
        self.used_bytes = 0
        self.limit_bytes = capacity_bytes
        self._capacity_bytes = capacity_bytes
        self._evicted = _EvictedHashes()

    def add(self, hashes: Sequence[BlockHash], slot_bytes: int) -> None:
        """Count stored blocks. The leading ones that were evicted before move the share."""
        self.used_bytes += len(hashes) * slot_bytes
        if not self.learns or hashes[0] not in self._evicted:
            return
        missed = [self._evicted.pop(block_hash) for block_hash in takewhile(self._evicted.__contains__, hashes)]
        num_read, ratio = sum(missed), self._evicted.read_ratio()
        growth = (len(missed) - num_read) * max(1.0, ratio) - num_read * max(1.0, 1 / ratio)
        limit = self.limit_bytes + int(growth * slot_bytes)
        min_bytes = int(self._capacity_bytes * MIN_PROBATION_SHARE)
        self.limit_bytes = min(self._capacity_bytes, max(min_bytes, limit))

    def remove(self, hashes: Sequence[BlockHash], num_unread: int, slot_bytes: int) -> None:
        """Count blocks that left from a chain's tail, the first `num_unread` of which nobody had read."""
        self.used_bytes -= num_unread * slot_bytes
        if self.learns:
            self._evicted.add(hashes[:num_unread], was_read=False)
            self._evicted.add(hashes[num_unread:], was_read=True)
            self._evicted.limit(min(MAX_REMEMBERED, self._capacity_bytes // slot_bytes))


class _EvictedHashes:
    """The latest evicted hashes with whether each had been read, in two generations; the older one goes at once."""

    def __init__(self) -> None:
        self._young: dict[BlockHash, bool] = {}
        self._old: dict[BlockHash, bool] = {}
        self._num_read = self._num_unread = 1  # Hashes added since the older generation began, plus one.

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._young or block_hash in self._old

    def add(self, hashes: Sequence[BlockHash], *, was_read: bool) -> None:
        self._young.update(dict.fromkeys(hashes, was_read))
        if was_read:
            self._num_read += len(hashes)
        else:
            self._num_unread += len(hashes)

    def limit(self, max_hashes: int) -> None:
        """Start a new generation once the younger one is half of `max_hashes`."""
        if 2 * len(self._young) > max_hashes:
            self._old, self._young = self._young, {}
            num_read = sum(self._old.values())
            self._num_read, self._num_unread = 1 + num_read, 1 + len(self._old) - num_read

    def pop(self, block_hash: BlockHash) -> bool:
        """Forget a hash and return whether it had been read. Raises KeyError when it is not remembered."""
        was_read = self._young.pop(block_hash, None)
        return self._old.pop(block_hash) if was_read is None else was_read

    def read_ratio(self) -> float:
        """Return the number of remembered hashes that had been read per hash that had not."""
        return self._num_read / self._num_unread
