"""Who must make capacity: a tenant at its limit among its own blocks, probation before what somebody has asked for."""

from prfaas.cachepool.arena import Arena
from prfaas.cachepool.capacity import MAX_ACCOUNTS, MIN_PROBATION_SHARE, Capacity, Probation, TenantShares
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.slots import LeaseId
from prfaas.hashing import root_hash
from prfaas.types import BlockHash
from tests.support.pool_integrity import check_integrity
from tests.support.pool_layouts import SLOT_BYTES, hybrid, name

NUM_PREFIX = 10
MODEL = hybrid().model
ALICE, BOB = root_hash(MODEL, b"alice"), root_hash(MODEL, b"bob")


class Node:
    """A pool of ten prefix slots and as many transfer slots."""

    def __init__(self, shares: TenantShares, *, probation_blocks: int = NUM_PREFIX) -> None:
        self.pool = Pool(2 * NUM_PREFIX * SLOT_BYTES, shares=shares)
        self.pool._capacity.probation.limit_bytes = probation_blocks * SLOT_BYTES
        self.arena: Arena = self.pool.arena(hybrid())

    def keep(self, first: int, end: int, *, root: BlockHash = ALICE, lease: LeaseId | None = None) -> list[bool]:
        """Publish blocks of one chain; which of them were taken."""
        own = self.pool.open_lease() if lease is None else lease
        slots = self.pool.allocate(self.arena, 0, end - first, own)
        assert slots is not None
        self.pool.publish_run(
            self.arena,
            slots,
            group=0,
            hashes=[name(n) for n in range(first, end)],
            parent=root,
            num_tokens=32,
            root=root,
        )
        taken = [number in self.held(first, end) for number in range(first, end)]
        if lease is None:
            self.pool.end_lease(own)
        check_integrity(self.pool)
        return taken

    def held(self, first: int, end: int) -> list[int]:
        return [number for number in range(first, end) if self.pool.find(self.arena, 0, name(number)) is not None]

    def ask(self, first: int, end: int) -> None:
        lease = self.pool.open_lease()
        slots = [self.pool.find(self.arena, 0, name(number)) for number in range(first, end)]
        self.pool.pin(self.arena, [slot for slot in slots if slot is not None], lease)
        self.pool.end_lease(lease)
        check_integrity(self.pool)

    def tenant_blocks(self) -> dict[str, int]:
        return {tenant: num // SLOT_BYTES for tenant, num in self.pool.stats().tenant_bytes.items()}


def test_a_tenant_at_its_limit_evicts_only_its_own_blocks() -> None:
    node = Node(TenantShares(of_tenants={"alice": 0.4}))
    node.keep(100, 106, root=BOB)
    for first in range(0, 40, 2):
        node.keep(first, first + 2)
    assert node.held(100, 106) == list(range(100, 106))
    assert node.held(0, 40) == [36, 37, 38, 39]
    assert node.tenant_blocks() == {"alice": 4}


def test_a_tenant_with_all_its_share_in_use_gets_no_more() -> None:
    node = Node(TenantShares(each_tenant=0.3))
    lease = node.pool.open_lease()
    assert node.keep(0, 5, lease=lease) == [True, True, True, False, False]
    assert node.keep(10, 11, lease=lease) == [False]
    assert node.keep(100, 103, root=BOB) == [True, True, True]
    assert node.tenant_blocks() == {ALICE.hex(): 3, BOB.hex(): 3}
    node.pool.end_lease(lease)
    assert node.keep(10, 11) == [True]


def test_one_limit_covers_a_tenants_prompts_of_all_models() -> None:
    capacity = Capacity(1000, TenantShares(of_tenants={"alice": 0.5}))
    first, second = (capacity.account(model, root_hash(model, b"alice")) for model in ("one", "two"))
    assert first is second and first.limit_bytes == 500
    assert capacity.account("one", BOB).limit_bytes is None


def test_unread_blocks_do_not_evict_read_blocks() -> None:
    node = Node(TenantShares(learns=True), probation_blocks=3)
    node.keep(0, 7)
    node.ask(0, 7)
    for first in range(100, 200, 2):
        assert node.keep(first, first + 2) == [True, True]
    assert node.held(0, 7) == list(range(7))
    assert node.held(100, 200) == [196, 198, 199]


def test_blocks_on_probation_use_all_spare_room() -> None:
    node = Node(TenantShares(learns=True), probation_blocks=3)
    node.keep(0, 10)
    assert node.held(0, 10) == list(range(10))
    node.ask(0, 10)
    assert node.pool._capacity.probation.used_bytes == 0


def test_blocks_after_read_blocks_are_on_probation() -> None:
    node = Node(TenantShares(learns=True), probation_blocks=3)
    lease = node.pool.open_lease()
    slots = node.pool.allocate(node.arena, 0, 8, lease)
    assert slots is not None
    hashes = [name(number) for number in range(8)]
    node.pool.publish_run(node.arena, slots[:6], group=0, hashes=hashes[:6], parent=ALICE, num_tokens=32, root=ALICE)
    node.ask(0, 6)
    node.pool.publish_run(
        node.arena, slots[6:], group=0, hashes=hashes[6:], parent=hashes[5], num_tokens=224, root=ALICE
    )
    node.pool.end_lease(lease)
    check_integrity(node.pool)
    assert node.pool._capacity.probation.used_bytes == 2 * SLOT_BYTES
    node.keep(100, 102)
    node.keep(200, 203)
    assert node.held(0, 8) == list(range(6))


def test_a_prompt_larger_than_the_probation_share_is_stored_whole() -> None:
    node = Node(TenantShares(learns=True), probation_blocks=3)
    node.keep(0, 10)
    node.ask(0, 10)
    assert node.keep(100, 105) == [True] * 5
    assert node.held(0, 10) == list(range(5))
    assert node.keep(200, 203) == [True] * 3
    assert node.held(0, 10) == list(range(5))
    assert node.held(100, 105) == [100, 101]


def test_the_probation_share_follows_the_misses() -> None:
    probation = Probation(1000, learns=True)
    shares = [probation.limit_bytes]
    for number in range(20):
        _miss(probation, number, was_read=True)
        shares.append(probation.limit_bytes)
    assert shares == sorted(shares, reverse=True) and shares[-1] < shares[0] == 1000
    low = probation.limit_bytes
    for number in range(100, 200):
        _miss(probation, number, was_read=False)
    assert low < probation.limit_bytes <= 1000


def test_the_probation_share_has_a_minimum() -> None:
    probation = Probation(1600, learns=True)
    for number in range(1000):
        _miss(probation, number, was_read=True)
    assert probation.limit_bytes == 1600 * MIN_PROBATION_SHARE


def test_old_evictions_do_not_move_the_probation_share() -> None:
    probation = Probation(1000, learns=True)
    probation.remove([name(1)], 0, 10)
    for number in range(100, 300):
        probation.remove([name(number)], 0, 10)
    probation.add([name(1)], 10)
    assert probation.limit_bytes == 1000


def _miss(probation: Probation, number: int, *, was_read: bool) -> None:
    """A block leaves and is stored again."""
    probation.remove([name(number)], 0 if was_read else 1, 10)
    probation.add([name(number)], 10)


def test_a_pool_learns_to_protect_read_blocks_from_a_scan() -> None:
    held = {}
    for learns in (False, True):
        node = Node(TenantShares(learns=learns))
        for round_ in range(10):
            node.keep(0, 4)
            node.ask(0, 4)
            for first in range(1000 * round_, 1000 * round_ + 9, 3):
                node.keep(100 + first, 103 + first)
            held[learns] = node.held(0, 4)
    assert held == {False: [0], True: [0, 1, 2, 3]}


def test_accounts_of_empty_tenants_are_dropped() -> None:
    capacity = Capacity(1 << 30, TenantShares(each_tenant=0.5))
    first = capacity.account(MODEL, ALICE)
    capacity.add_blocks(first, [name(1)], 10)
    for number in range(3 * MAX_ACCOUNTS):
        capacity.account(MODEL, name(number))
    assert len(capacity.tenant_bytes()) <= MAX_ACCOUNTS
    assert capacity.account(MODEL, ALICE) is first
