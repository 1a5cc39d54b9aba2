"""Order, size and fairness of the chunks of a link."""

from collections import Counter

from prfaas.transport.ranges import Slab
from prfaas.transport.sender.chunker import MIN_CHUNK_BYTES, SLOW_CHUNK_BYTES, Chunk, Chunker, max_chunk_bytes

MIB = 1 << 20
A, B = b"a" * 16, b"b" * 16


def _chunker(**priorities: int) -> Chunker:
    chunker = Chunker(num_connections=2)
    for name, priority in priorities.items():
        chunker.add(name.encode() * 16, priority=priority)
    return chunker


def _served(chunker: Chunker, count: int) -> Counter[bytes]:
    """Return the number of chunks that each transfer gets of the next ones."""
    return Counter(_take(chunker).transfer_id for _ in range(count))


def _take(chunker: Chunker) -> Chunk:
    chunk = chunker.take()
    assert chunk is not None
    return chunk


def test_layers_leave_in_the_order_in_which_they_became_ready() -> None:
    chunker = _chunker(a=0)
    for layer in (3, 1, 2):
        chunker.ready(A, Slab(0, 4, layer * 65536, 32768))
    assert [_take(chunker).slab.offset // 65536 for _ in range(3)] == [3, 1, 2]


def test_slices_of_many_blocks_form_one_chunk() -> None:
    chunker = _chunker(a=0)
    chunker.ready(A, Slab(0, 64, 8192, 2048))
    assert _take(chunker).slab == Slab(0, 64, 8192, 2048)


def test_adjacent_slabs_are_merged_while_they_wait() -> None:
    chunker = _chunker(a=0)
    chunker.ready(A, Slab(0, 1, 0, 1000))
    chunker.ready(A, Slab(1, 1, 0, 1000))  # Next object.
    chunker.ready(A, Slab(0, 2, 1000, 500))  # Next layer of both objects.
    assert _take(chunker).slab == Slab(0, 2, 0, 1500) and chunker.take() is None


def test_new_transfer_shares_the_link_with_an_older_backlog() -> None:
    chunker = _chunker(a=0, b=0)
    chunker.ready(A, Slab(0, 1, 0, 1000 * MIB))
    for _ in range(100):
        _take(chunker)
    chunker.ready(B, Slab(0, 1, 0, 4 * MIB))
    served = Counter(_take(chunker).transfer_id for _ in range(8))
    assert 3 <= served[B] <= 4


def test_urgent_transfer_takes_nearly_the_whole_link() -> None:
    chunker = _chunker(a=1, b=0)
    chunker.ready(A, Slab(0, 1, 0, 1000 * MIB))
    chunker.ready(B, Slab(0, 1, 0, 1000 * MIB))
    served = Counter(_take(chunker).transfer_id for _ in range(170))
    assert 155 <= served[B] <= 165


def _with_tenants(**tenants: tuple[int, float]) -> Chunker:
    """Return a chunker with so many busy transfers of each tenant, and the tenants' weights."""
    chunker = Chunker(num_connections=2, weight_of=lambda tenant: tenants[tenant][1])
    for tenant, (num_transfers, _) in tenants.items():
        for number in range(num_transfers):
            transfer_id = tenant.encode() * 15 + bytes([number])
            chunker.add(transfer_id, priority=3, tenant=tenant)
            chunker.ready(transfer_id, Slab(0, 1, 0, 1000 * MIB))
    return chunker


def test_tenants_share_the_link_whatever_their_number_of_transfers() -> None:
    served = _served(_with_tenants(a=(50, 1.0), b=(1, 1.0)), 200)
    assert 99 <= served[b"b" * 15 + b"\0"] <= 101
    assert {count for transfer_id, count in served.items() if transfer_id[0] == ord("a")} == {2}


def test_tenants_share_the_link_by_weight() -> None:
    served = _served(_with_tenants(a=(3, 0.75), b=(1, 0.25)), 200)
    assert 49 <= served[b"b" * 15 + b"\0"] <= 51


def test_urgent_transfer_overtakes_other_tenants_and_its_own() -> None:
    chunker = _with_tenants(a=(5, 1.0), b=(5, 1.0))
    urgent = b"u" * 16
    chunker.add(urgent, priority=2, tenant="a")
    chunker.ready(urgent, Slab(0, 1, 0, 1000 * MIB))
    assert _served(chunker, 180)[urgent] >= 155


def test_tenant_that_comes_back_gets_no_credit_for_its_absence() -> None:
    chunker = _with_tenants(a=(1, 1.0), b=(1, 1.0))
    first, second = b"a" * 15 + b"\0", b"b" * 15 + b"\0"
    _served(chunker, 100)
    chunker.remove(second)
    _served(chunker, 100)
    chunker.add(second, priority=3, tenant="b")
    chunker.ready(second, Slab(0, 1, 0, 1000 * MIB))
    assert 48 <= _served(chunker, 100)[first] <= 52


def test_chunks_shrink_towards_the_end_so_that_connections_finish_together() -> None:
    chunker = _chunker(a=0)
    chunker.ready(A, Slab(0, 1, 0, 32 * MIB))
    sizes = []
    while (chunk := chunker.take()) is not None:
        sizes.append(chunk.slab.num_bytes)
    assert sizes[0] == MIB and sizes[-4:] == [MIN_CHUNK_BYTES] * 4 and sizes == sorted(sizes, reverse=True)


def test_chunk_that_is_put_back_leaves_first() -> None:
    chunker = _chunker(a=0)
    chunker.ready(A, Slab(0, 1, 0, 8 * MIB))
    first, _ = _take(chunker), _take(chunker)
    chunker.put_back(first)
    assert _take(chunker).slab.offset == first.slab.offset


def test_removed_transfer_has_nothing_left() -> None:
    chunker = _chunker(a=0, b=0)
    chunker.ready(A, Slab(0, 1, 0, MIB))
    chunk = _take(chunker)
    chunker.remove(A)
    chunker.put_back(chunk)
    assert chunker.take() is None and not chunker.has_work()


def test_cleared_transfer_is_served_once_for_its_new_bytes() -> None:
    chunker = _chunker(a=0)
    chunker.ready(A, Slab(0, 1, 0, MIN_CHUNK_BYTES))
    chunker.clear(A)
    assert chunker.is_drained(A)
    chunker.ready(A, Slab(0, 1, 0, MIN_CHUNK_BYTES))
    assert _take(chunker).slab.length == MIN_CHUNK_BYTES and chunker.take() is None


def test_chunk_of_a_slow_link_takes_a_tenth_of_a_second_at_most() -> None:
    chunker = _chunker(a=0)
    chunker.ready(A, Slab(0, 1, 0, 64 * MIB))
    sizes = []
    for rate in (float("inf"), 1e9, 8e6, 2e6, 100.0):
        chunker.max_chunk_bytes = max_chunk_bytes(rate)
        sizes.append(_take(chunker).slab.num_bytes)
    assert sizes == [MIB, MIB, 512 << 10, 128 << 10, SLOW_CHUNK_BYTES]
