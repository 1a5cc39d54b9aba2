"""The room for prefix blocks: how much of it whose blocks take, and whose must leave when more is needed (pure).

Three limits, in this order: what one tenant may hold, what blocks may hold that nobody has asked for again, what there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from prfaas.cachepool.block_run import BlockRun
from prfaas.cachepool.eviction import ALL, Candidates
from prfaas.hashing import NO_HASH, root_hash
from prfaas.types import BlockHash

MAX_ACCOUNTS = 1024  # beyond so many, tenants that hold nothing are forgotten when another one comes
NEWCOMERS = "newcomers"  # the view of runs whose tail nobody has asked for since it was stored


@dataclass(frozen=True)
class TenantShares:
    """Shares of the room, from 0 to 1. `of_tenants` is by the tenant's salt, `each_tenant` for every other one.

    `newcomers` is the most that blocks may be that nobody has asked for; with `learns` a smaller share is learnt.
    """

    newcomers: float = 1.0
    learns: bool = False
    each_tenant: float = 1.0
    of_tenants: Mapping[str, float] = field(default_factory=dict)


NO_LIMITS = TenantShares()


@dataclass(eq=False)
class TenantAccount:
    """What one tenant's prefix blocks take. `view` is its candidates'; without a limit it has none."""

    name: str
    limit_bytes: int | None
    used_bytes: int = 0

    @property
    def views(self) -> tuple[str, ...]:
        return () if self.limit_bytes is None else (self.view,)

    @property
    def view(self) -> str:
        return f"tenant {self.name}"


class Shortage(NamedTuple):
    """So many bytes must leave, of runs in this view."""

    num_bytes: int
    view: str


class Capacity:
    """Counts bytes; whoever stores and removes blocks says so."""

    def __init__(self, budget_bytes: int, shares: TenantShares) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.newcomers = Probation(budget_bytes, most=shares.newcomers, learns=shares.learns)
        self.candidates = Candidates()
        self._shares = shares
        self._unlimited = TenantAccount("", None)
        self._by_name: dict[str, TenantAccount] = {}  # those with a limit
        self._max_accounts = MAX_ACCOUNTS
        self._named: dict[str, dict[BlockHash, str]] = {}  # by model: the tenants with a share of their own

    def account(self, model: str, root: BlockHash) -> TenantAccount:
        """The account of the tenant whose prompts of this model have that root."""
        named = self._named_of(model).get(root)
        if named is None and (self._shares.each_tenant >= 1 or root == NO_HASH):
            return self._unlimited
        name = root.hex() if named is None else named
        account = self._by_name.get(name)
        if account is None:
            if len(self._by_name) >= self._max_accounts:
                self._forget_empty()
            share = self._shares.each_tenant if named is None else self._shares.of_tenants[named]
            account = self._by_name[name] = TenantAccount(name, int(self.budget_bytes * share))
        return account

    def _named_of(self, model: str) -> dict[BlockHash, str]:
        if model not in self._named:
            self._named[model] = {root_hash(model, name.encode()): name for name in self._shares.of_tenants}
        return self._named[model]

    def _forget_empty(self) -> None:
        for account in [its for its in self._by_name.values() if not its.used_bytes]:
            self.candidates.drop_view(self._by_name.pop(account.name).view)
        self._max_accounts = max(MAX_ACCOUNTS, 2 * len(self._by_name))

    def tenant_bytes(self) -> dict[str, int]:
        """What each tenant with a limit holds; from any thread."""
        return {its.name: its.used_bytes for its in list(self._by_name.values())}

    def shortage(self, account: TenantAccount, num_bytes: int) -> Shortage | None:
        """What must leave first before so many bytes more of a tenant, which nobody has asked for yet, fit."""
        if account.limit_bytes is not None and (excess := account.used_bytes + num_bytes - account.limit_bytes) > 0:
            return Shortage(excess, account.view)
        lacking = self.used_bytes + num_bytes - self.budget_bytes
        if lacking <= 0:
            return None
        excess = self.newcomers.used_bytes + num_bytes - self.newcomers.limit_bytes
        if self.newcomers.are_limited and excess > 0:
            return Shortage(min(lacking, excess), NEWCOMERS)
        return Shortage(lacking, ALL)

    def victim(self, view: str) -> tuple[BlockRun, float] | None:
        """The run whose tail leaves, with its key: any run when all newcomers are in use, since a prompt in the making is
        worth more whole."""
        found = self.candidates.pop(view)
        return self.candidates.pop() if found is None and view == NEWCOMERS else found

    def came(self, account: TenantAccount, hashes: Sequence[BlockHash], slot_bytes: int) -> None:
        """Blocks of one chain were stored."""
        account.used_bytes += len(hashes) * slot_bytes
        self.used_bytes += len(hashes) * slot_bytes
        self.newcomers.stored(hashes, slot_bytes)

    def left(self, account: TenantAccount, hashes: Sequence[BlockHash], slot_bytes: int, *, num_newcomers: int) -> None:
        """Blocks of one chain were removed from its tail, the first `num_newcomers` of which nobody had asked for."""
        account.used_bytes -= len(hashes) * slot_bytes
        self.used_bytes -= len(hashes) * slot_bytes
        self.newcomers.left(hashes, num_newcomers, slot_bytes)

    def views(self, account: TenantAccount, run: BlockRun) -> tuple[str, ...]:
        """Where a run stands among the candidates, but for the view of all."""
        is_newcomer = run.num_asked < len(run)
        return (*account.views, NEWCOMERS) if self.newcomers.are_limited and is_newcomer else account.views

    def check_integrity(self, runs: Collection[tuple[BlockRun, TenantAccount, int]]) -> None:
        """Compare the counts with all runs, their accounts and the bytes of one of their slots.

        Raises:
            AssertionError: something is miscounted, or a limit is exceeded.
        """
        evictable = {run for run, *_ in runs if run.num_kept() < len(run)}
        assert all(run in self.candidates for run in evictable), "an idle tail cannot be evicted"
        assert len(evictable) == len(self.candidates), "a block is evictable though it is needed"
        used: Counter[TenantAccount] = Counter()
        newcomer_bytes = 0
        for run, account, slot_bytes in runs:
            used[account] += len(run) * slot_bytes
            newcomer_bytes += (len(run) - run.num_asked) * slot_bytes
        assert newcomer_bytes == self.newcomers.used_bytes, "what nobody has asked for is miscounted"
        assert used.total() == self.used_bytes <= self.budget_bytes, "the prefix budget is exceeded or miscounted"
        for account in (self._unlimited, *self._by_name.values()):
            assert account.used_bytes == used[account], "what a tenant holds is miscounted"
            assert account.limit_bytes is None or account.used_bytes <= account.limit_bytes, "a tenant holds too much"


LEAST_SHARE = 1 / 16
MAX_REMEMBERED = 1 << 18  # hashes, about 150 bytes each; fewer where fewer blocks fit the room


class Probation:
    """Their bytes, and the most that they may be of a full room."""

    def __init__(self, room_bytes: int, *, most: float, learns: bool) -> None:
        self.used_bytes = 0
        self._most_bytes = int(room_bytes * most)
        self._least_bytes = min(self._most_bytes, int(room_bytes * LEAST_SHARE))
        self._room_bytes = room_bytes
        self._learns = learns
        self.limit_bytes = self._most_bytes
        self._gone = _Generations()

    @property
    def are_limited(self) -> bool:
        """Whether their share can ever be less than the room."""
        return self._learns or self._most_bytes < self._room_bytes

    def stored(self, hashes: Sequence[BlockHash], slot_bytes: int) -> None:
        """Blocks of one chain were stored; those that had left before, up to the first that had not, move the share."""
        self.used_bytes += len(hashes) * slot_bytes
        if not self._learns or hashes[0] not in self._gone:
            return
        missed = [self._gone.pop(its) for its in takewhile(self._gone.__contains__, hashes)]
        num_asked, ratio = sum(missed), self._gone.asked_ratio()
        more = (len(missed) - num_asked) * max(1.0, ratio) - num_asked * max(1.0, 1 / ratio)
        limit = self.limit_bytes + int(more * slot_bytes)
        self.limit_bytes = min(self._most_bytes, max(self._least_bytes, limit))

    def left(self, hashes: Sequence[BlockHash], num_newcomers: int, slot_bytes: int) -> None:
        """Blocks left from the tail of a chain, the first `num_newcomers` of them without having been asked for."""
        self.used_bytes -= num_newcomers * slot_bytes
        if self._learns:
            self._gone.add(hashes[:num_newcomers], was_asked=False)
            self._gone.add(hashes[num_newcomers:], was_asked=True)
            self._gone.forget_beyond(min(MAX_REMEMBERED, self._room_bytes // slot_bytes))


class _Generations:
    """The latest hashes, each with whether it had been asked for; the older half goes at once."""

    def __init__(self) -> None:
        self._young: dict[BlockHash, bool] = {}
        self._old: dict[BlockHash, bool] = {}
        self._num_asked = self._num_others = 1  # how often they came since the older generation began

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._young or block_hash in self._old

    def add(self, hashes: Sequence[BlockHash], *, was_asked: bool) -> None:
        self._young.update(dict.fromkeys(hashes, was_asked))
        if was_asked:
            self._num_asked += len(hashes)
        else:
            self._num_others += len(hashes)

    def forget_beyond(self, max_hashes: int) -> None:
        """Have the younger half be the older one once it is full."""
        if 2 * len(self._young) > max_hashes:
            self._old, self._young = self._young, {}
            num_asked = sum(self._old.values())
            self._num_asked, self._num_others = 1 + num_asked, 1 + len(self._old) - num_asked

    def pop(self, block_hash: BlockHash) -> bool:
        """Forget a hash; whether it had been asked for. Raises KeyError when it is not remembered."""
        was_asked = self._young.pop(block_hash, None)
        return self._old.pop(block_hash) if was_asked is None else was_asked

    def asked_ratio(self) -> float:
        """How many were remembered that had been asked for, for each that had not."""
        return self._num_asked / self._num_others
