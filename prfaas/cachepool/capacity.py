"""The room for prefix blocks: how much of it whose blocks take, and whose must leave when more is needed (pure).

Three limits, in this order: what one tenant may hold, what blocks may hold that nobody has asked for again, what there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prfaas.cachepool.block_run import Run
from prfaas.cachepool.eviction import ALL, Candidates
from prfaas.cachepool.probation import Newcomers
from prfaas.hashing import NO_HASH, root_hash
from prfaas.types import BlockHash

MAX_ACCOUNTS = 1024  # beyond so many, tenants that hold nothing are forgotten when another one comes
NEWCOMERS = "newcomers"  # the view of runs whose tail nobody has asked for since it was stored


@dataclass(frozen=True)
class Shares:
    """Shares of the room, from 0 to 1. `of_tenants` is by the tenant's salt, `each_tenant` for every other one.

    `newcomers` is the most that blocks may be that nobody has asked for; with `learns` a smaller share is learnt.
    """

    newcomers: float = 1.0
    learns: bool = False
    each_tenant: float = 1.0
    of_tenants: Mapping[str, float] = field(default_factory=dict)


NO_LIMITS = Shares()


@dataclass(eq=False)
class Account:
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


class Room:
    """Counts bytes; whoever stores and removes blocks says so."""

    def __init__(self, budget_bytes: int, shares: Shares) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.newcomers = Newcomers(budget_bytes, most=shares.newcomers, learns=shares.learns)
        self.candidates = Candidates()
        self._shares = shares
        self._unlimited = Account("", None)
        self._by_name: dict[str, Account] = {}  # those with a limit
        self._max_accounts = MAX_ACCOUNTS
        self._named: dict[str, dict[BlockHash, str]] = {}  # by model: the tenants with a share of their own

    def account(self, model: str, root: BlockHash) -> Account:
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
            account = self._by_name[name] = Account(name, int(self.budget_bytes * share))
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

    def shortage(self, account: Account, num_bytes: int) -> Shortage | None:
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

    def victim(self, view: str) -> tuple[Run, float] | None:
        """The run whose tail leaves, with its key: any run when all newcomers are in use, since a prompt in the making is
        worth more whole."""
        found = self.candidates.pop(view)
        return self.candidates.pop() if found is None and view == NEWCOMERS else found

    def came(self, account: Account, hashes: Sequence[BlockHash], slot_bytes: int) -> None:
        """Blocks of one chain were stored."""
        account.used_bytes += len(hashes) * slot_bytes
        self.used_bytes += len(hashes) * slot_bytes
        self.newcomers.stored(hashes, slot_bytes)

    def left(self, account: Account, hashes: Sequence[BlockHash], slot_bytes: int, *, num_newcomers: int) -> None:
        """Blocks of one chain were removed from its tail, the first `num_newcomers` of which nobody had asked for."""
        account.used_bytes -= len(hashes) * slot_bytes
        self.used_bytes -= len(hashes) * slot_bytes
        self.newcomers.left(hashes, num_newcomers, slot_bytes)

    def views(self, account: Account, run: Run) -> tuple[str, ...]:
        """Where a run stands among the candidates, but for the view of all."""
        is_newcomer = run.num_asked < len(run)
        return (*account.views, NEWCOMERS) if self.newcomers.are_limited and is_newcomer else account.views

    def check_integrity(self, runs: Collection[tuple[Run, Account, int]]) -> None:
        """Compare the counts with all runs, their accounts and the bytes of one of their slots.

        Raises:
            AssertionError: something is miscounted, or a limit is exceeded.
        """
        evictable = {run for run, *_ in runs if run.num_kept() < len(run)}
        assert all(run in self.candidates for run in evictable), "an idle tail cannot be evicted"
        assert len(evictable) == len(self.candidates), "a block is evictable though it is needed"
        used: Counter[Account] = Counter()
        newcomer_bytes = 0
        for run, account, slot_bytes in runs:
            used[account] += len(run) * slot_bytes
            newcomer_bytes += (len(run) - run.num_asked) * slot_bytes
        assert newcomer_bytes == self.newcomers.used_bytes, "what nobody has asked for is miscounted"
        assert used.total() == self.used_bytes <= self.budget_bytes, "the prefix budget is exceeded or miscounted"
        for account in (self._unlimited, *self._by_name.values()):
            assert account.used_bytes == used[account], "what a tenant holds is miscounted"
            assert account.limit_bytes is None or account.used_bytes <= account.limit_bytes, "a tenant holds too much"
