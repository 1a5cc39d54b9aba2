"""Matches, refusals and voided holdings of the index. Some probes fail in other indexes."""

import pytest

from prfaas.errors import IndexRefusal
from prfaas.hashing import HashChain, root_hash
from prfaas.index.inventory import Inventory
from prfaas.index.memory.index import Index
from prfaas.index.query import Query
from prfaas.index.segments import Checkpoint, Digest, Holding, Segment
from prfaas.kv.layout import Layout
from prfaas.pool_events import BlockRemoved, BlockStored, PoolEvent
from prfaas.types import AgentName, BlockHash, ClusterName
from tests.support.index_world import group, layouts

NODE, EAST = AgentName("n1"), ClusterName("east")
HYBRID = layouts("m", group("full_attention", 16), group("linear_state", 0))[0]
WIDE = layouts("m", group("full_attention", 64), group("linear_state", 0))[0]
DENSE = layouts("m", group("full_attention", 16))[0]
WINDOWED = layouts("m", group("full_attention", 16), group("sliding_window", 16, 128))[0]
SHORT_WINDOWS = layouts("m", group("sliding_window", 16, 128), group("full_attention", 32))[0]
LONG = HashChain(root_hash("m"), list(range(3200)))


def query(chain: HashChain = LONG, *, limit: int | None = None, stated: tuple[int, ...] = ()) -> Query:
    checkpoints = tuple((length, chain.at(length)) for length in stated)
    return Query("m", b"".join(chain.units), chain.num_tokens if limit is None else limit, checkpoints)


def blocks(layout: Layout, tokens: range, *, in_group: int = 0) -> list[PoolEvent]:
    ends = range(tokens.start + 16, tokens.stop + 1, 16)
    return [BlockStored(layout.fingerprint, in_group, LONG.at(end), LONG.at(end - 16), end) for end in ends]


def state(layout: Layout, length: int, *, in_group: int = 1) -> list[PoolEvent]:
    return [BlockStored(layout.fingerprint, in_group, LONG.at(length), LONG.at(length - length % 16), length)]


def index_of(layout: Layout, *events: PoolEvent, node: AgentName = NODE) -> Index:
    index = Index()
    tell(index, layout, *events, node=node)
    return index


def tell(index: Index, layout: Layout, *events: PoolEvent, node: AgentName = NODE, epoch: int = 1) -> None:
    inventory = Inventory()
    inventory.add_layout(layout)
    index.register(node, cluster=EAST, epoch=epoch, layouts=[layout])
    index.apply(node, inventory.apply(events))


def usable(index: Index, asked: Query) -> list[tuple[int, int, str]]:
    return [(match.usable_tokens, match.attention_tokens, match.reason) for match in index.match(asked).nodes]


def test_a_match_ends_at_the_only_state() -> None:
    index = index_of(HYBRID, *blocks(HYBRID, range(1600)), *state(HYBRID, 800))
    assert usable(index, query()) == [(800, 1600, "state")]


def test_a_state_without_attention_matches_nothing() -> None:
    assert usable(index_of(HYBRID, *state(HYBRID, 800)), query()) == []


def test_the_last_window_serves_the_end_and_nothing_earlier() -> None:
    window = blocks(WINDOWED, range(1600), in_group=1)
    gone = [BlockRemoved(WINDOWED.fingerprint, 1, LONG.at(end)) for end in range(16, 1600 - 128 + 1, 16)]
    index = index_of(WINDOWED, *blocks(WINDOWED, range(1600)), *window, *gone)
    assert usable(index, query(limit=1600)) == [(1600, 1600, "complete")]
    assert usable(index, query(limit=1599)) == [(0, 1599, "window")]


def test_windows_in_shorter_blocks_than_full_attention_serve_the_common_ends() -> None:
    """Nobody holds the blocks of 16 tokens before the window, so the window begins a chain of its own."""
    ends = range(32, 1601, 32)
    full = [BlockStored(SHORT_WINDOWS.fingerprint, 1, LONG.at(end), LONG.at(end - 32), end) for end in ends]
    index = index_of(SHORT_WINDOWS, *blocks(SHORT_WINDOWS, range(1328, 1504)), *full)
    assert usable(index, query(limit=1600)) == [(1504, 1600, "window")]
    gone = BlockRemoved(SHORT_WINDOWS.fingerprint, 0, LONG.at(1504))
    assert usable(index_of(SHORT_WINDOWS, *blocks(SHORT_WINDOWS, range(1328, 1504)), *full, gone), query()) == [
        (1472, 1600, "window")
    ]


def test_a_block_counts_only_when_all_its_shards_are_there() -> None:
    both = layouts("m", group("full_attention", 16), size=2)
    index, inventory = Index(), Inventory()
    for layout in both:
        inventory.add_layout(layout)
    index.register(NODE, cluster=EAST, epoch=1, layouts=both)
    index.apply(NODE, inventory.apply(blocks(both[0], range(320))))
    assert usable(index, query()) == []
    index.apply(NODE, inventory.apply(blocks(both[1], range(160))))
    assert usable(index, query()) == [(160, 160, "blocks")]


def test_a_new_epoch_voids_all_holdings_and_a_sweep_frees_them() -> None:
    index = index_of(HYBRID, *blocks(HYBRID, range(1600)), *state(HYBRID, 800))
    assert index.register(NODE, cluster=EAST, epoch=2, layouts=[HYBRID])
    assert usable(index, query()) == []
    assert index.digests(NODE) == {}
    assert index.num_runs() == 2
    index.sweep(100)
    assert index.num_runs() == 0


def test_a_silent_node_is_left_out_and_keeps_its_holdings() -> None:
    index = index_of(DENSE, *blocks(DENSE, range(160)))
    index.set_live(NODE, False)
    assert usable(index, query()) == []
    index.set_live(NODE, True)
    assert usable(index, query()) == [(160, 160, "blocks")]


def test_another_salt_or_extra_key_never_matches() -> None:
    index = index_of(DENSE, *blocks(DENSE, range(1600)))
    tokens = list(range(3200))
    for chain in (
        HashChain(root_hash("m", b"salt"), tokens),
        HashChain(root_hash("m"), tokens, extra_keys={0: b"an adapter"}),
        HashChain(root_hash("m"), tokens, extra_keys={3: b"an image"}),
    ):
        assert all(match.usable_tokens <= 48 for match in index.match(query(chain)).nodes)


def test_two_chains_match_up_to_their_fork() -> None:
    fork = HashChain(root_hash("m"), [*range(500), *range(9000, 10000)])
    ends = range(16, 1489, 16)
    events = [BlockStored(DENSE.fingerprint, 0, fork.at(end), fork.at(end - 16), end) for end in ends]
    index = index_of(DENSE, *blocks(DENSE, range(3200)), *events)
    assert usable(index, query(fork)) == [(1488, 1488, "complete")]
    assert usable(index, query()) == [(3200, 3200, "complete")]
    mixed = HashChain(root_hash("m"), [*range(500), *range(20000, 21000)])
    assert usable(index, query(mixed)) == [(496, 496, "blocks")]


def test_a_state_at_an_odd_length_is_found_when_its_hash_is_stated() -> None:
    index = index_of(HYBRID, *blocks(HYBRID, range(1600)), *state(HYBRID, 807))
    answer = index.match(query())
    assert answer.nodes[0].usable_tokens == 0
    assert answer.odd_lengths == (807,)
    assert usable(index, query(stated=(807,))) == [(807, 1600, "state")]


def test_a_query_for_an_unknown_model_is_refused() -> None:
    with pytest.raises(IndexRefusal) as refusal:
        index_of(DENSE).match(Query("other", b"", 1))
    assert refusal.value.reason == "unknown_model"


@pytest.mark.parametrize(
    "asked",
    [
        Query("m", bytes(17), 1),
        Query("m", bytes(16), 33),
        Query("m", bytes(16), -1),
        Query("m", bytes(16), 16, ((0, LONG.at(16)),)),
        Query("m", bytes(16), 16, ((7, BlockHash(bytes(8))),)),
    ],
)
def test_a_query_with_malformed_hashes_is_refused(asked: Query) -> None:
    with pytest.raises(IndexRefusal) as refusal:
        index_of(DENSE).match(asked)
    assert refusal.value.reason == "alien_hash"


ATTENTION, LINEAR = Holding(HYBRID.fingerprint, 0, "memory"), Holding(HYBRID.fingerprint, 1, "memory")
HEAD, TAIL = LONG.at(16), LONG.at(16)[:8]


@pytest.mark.parametrize(
    ("announcement", "reason"),
    [
        (Segment(Holding(bytes(16), 0, "memory"), HEAD, TAIL, 1, True), "unknown_layout"),
        (Segment(Holding(HYBRID.fingerprint, 5, "memory"), HEAD, TAIL, 1, True), "unknown_layout"),
        (Segment(ATTENTION, HEAD, TAIL, 1, True, ((ATTENTION, 1),)), "wrong_block_size"),
        (Segment(ATTENTION, HEAD, TAIL, 1, True, ((LINEAR, 2),)), "malformed"),
        (Segment(ATTENTION, HEAD, TAIL, 2, True), "malformed"),
        (Segment(ATTENTION, HEAD, b"", 0, True), "malformed"),
        (Segment(ATTENTION, HEAD, TAIL * 65, 1, True), "malformed"),
        (Segment(ATTENTION, HEAD, TAIL[:7], 1, True), "malformed"),
        (Segment(ATTENTION, HEAD, bytes(8), 1, True), "alien_hash"),
        (Checkpoint(ATTENTION, LONG.at(32), LONG.at(16), 32, True), "wrong_block_size"),
        (Checkpoint(LINEAR, LONG.at(32), LONG.at(16), 32, True), "alien_hash"),
        (Checkpoint(LINEAR, LONG.at(33), LONG.at(33), 33, True), "alien_hash"),
        (Checkpoint(LINEAR, BlockHash(b"short"), LONG.at(32), 33, True), "alien_hash"),
        (Checkpoint(LINEAR, LONG.at(33), LONG.at(32), 0, True), "malformed"),
        (Checkpoint(LINEAR, LONG.at(32), LONG.at(32), 32, True, BlockHash(b"short")), "alien_hash"),
    ],
)
def test_an_announcement_that_contradicts_its_layout_is_refused(
    announcement: Segment | Checkpoint, reason: str
) -> None:
    index = index_of(HYBRID)
    with pytest.raises(IndexRefusal) as refusal:
        index.apply(NODE, [announcement])
    assert refusal.value.reason == reason
    assert index.digests(NODE) == {}


def test_blocks_of_a_model_with_states_only_are_refused() -> None:
    states = layouts("m", group("linear_state", 0))[0]
    with pytest.raises(IndexRefusal) as refusal:
        index_of(states).apply(NODE, [Segment(Holding(states.fingerprint, 0, "memory"), HEAD, TAIL, 1, True)])
    assert refusal.value.reason == "wrong_block_size"


def test_states_beside_blocks_of_another_size_are_refused() -> None:
    unlike = layouts("m", group("sliding_window", 32, 64), group("full_attention", 16), group("linear_state", 0))[0]
    window, states = (Holding(unlike.fingerprint, number, "memory") for number in (0, 2))
    with pytest.raises(IndexRefusal) as refusal:
        index_of(unlike).apply(NODE, [Segment(window, HEAD, TAIL, 1, True, ((states, 1),))])
    assert refusal.value.reason == "wrong_block_size"


def test_a_state_at_a_block_end_is_stored_beside_that_block() -> None:
    inventory = Inventory()
    inventory.add_layout(HYBRID)
    told = inventory.apply([*state(HYBRID, 800), *blocks(HYBRID, range(1600)), *state(HYBRID, 1280)])
    heads = {
        announcement.num_tokens: announcement.head for announcement in told if isinstance(announcement, Checkpoint)
    }
    assert heads == {800: None, 1280: LONG.at(65 * 16)}, "no block was known when the first one came"
    index = Index()
    index.register(NODE, cluster=EAST, epoch=1, layouts=[HYBRID])
    index.apply(NODE, told)
    exported = [announcement for _, announcement in index.announcements(lambda name: True)]
    states = [segment.states for segment in exported if isinstance(segment, Segment) and segment.states]
    assert states == [((LINEAR, 1 << 15),)]
    assert usable(index, query()) == [(1280, 1600, "state")]
    index.apply(NODE, inventory.apply([BlockRemoved(HYBRID.fingerprint, 1, LONG.at(1280))]))
    assert usable(index, query()) == [(800, 1600, "state")]
    assert index.digests(NODE) == inventory.digests()


def test_a_state_outlasts_its_blocks_and_serves_when_they_return() -> None:
    inventory = Inventory()
    inventory.add_layout(HYBRID)
    index = Index()
    index.register(NODE, cluster=EAST, epoch=1, layouts=[HYBRID])
    index.apply(NODE, inventory.apply([*blocks(HYBRID, range(1600)), *state(HYBRID, 800)]))
    gone = [BlockRemoved(HYBRID.fingerprint, 0, LONG.at(end)) for end in range(16, 1601, 16)]
    index.apply(NODE, inventory.apply(gone))
    index.sweep(100)
    assert usable(index, query()) == []
    copy = Index()
    copy.register(NODE, cluster=EAST, epoch=1, layouts=[HYBRID])
    for name, announcement in index.announcements(lambda name: True):
        copy.apply(name, [announcement])
    assert copy.digests(NODE) == inventory.digests()
    again = inventory.apply(blocks(HYBRID, range(1600)))
    for target in (index, copy):
        target.apply(NODE, again)
        assert usable(target, query()) == [(800, 1600, "state")]


def test_a_copied_index_removes_a_state_beside_any_fork() -> None:
    """A copy meets the forks of a cell in another order than they came in."""
    inventory, index, copy = Inventory(), Index(), Index()
    inventory.add_layout(HYBRID)
    for target in (index, copy):
        target.register(NODE, cluster=EAST, epoch=1, layouts=[HYBRID])

    def told(chain: HashChain, stop: int, *more: PoolEvent) -> list[Segment | Checkpoint]:
        ends = range(16, stop + 1, 16)
        events = [BlockStored(HYBRID.fingerprint, 0, chain.at(end), chain.at(end - 16), end) for end in ends]
        return list(inventory.apply([*events, *more]))

    early = HashChain(root_hash("m"), [*range(640), *[9] * 384])
    index.apply(NODE, told(HashChain(root_hash("m"), range(1024)), 1024))
    ending = BlockStored(HYBRID.fingerprint, 1, early.at(1024), early.at(1024), 1024)
    index.apply(NODE, told(early, 1024, ending))
    for number in range(40):
        index.apply(NODE, told(HashChain(root_hash("m"), [*range(32), *range(5000 + number, 5096 + number)]), 128))
    for name, announcement in index.announcements(lambda name: True):
        copy.apply(name, [announcement])
    gone = inventory.apply([BlockRemoved(HYBRID.fingerprint, 1, early.at(1024))])
    again = inventory.apply([ending])
    for change in (gone, again, again):
        index.apply(NODE, change)
        copy.apply(NODE, change)
        assert usable(copy, query(early)) == usable(index, query(early))
        assert copy.digests(NODE) == index.digests(NODE)
    assert index.digests(NODE) == inventory.digests()


def test_a_node_that_has_not_registered_cannot_announce() -> None:
    with pytest.raises(IndexRefusal) as refusal:
        Index().apply(NODE, [])
    assert refusal.value.reason == "unknown_node"


def test_announcing_twice_changes_nothing() -> None:
    inventory, index = Inventory(), Index()
    inventory.add_layout(HYBRID)
    index.register(NODE, cluster=EAST, epoch=1, layouts=[HYBRID])
    told = inventory.apply([*blocks(HYBRID, range(1600)), *state(HYBRID, 807)])
    index.apply(NODE, [*told, *told])
    assert index.digests(NODE) == inventory.digests()
    assert index.digests(NODE)[ATTENTION].num_blocks == 100
    assert index.digests(NODE)[LINEAR] == Digest(1, int.from_bytes(LONG.at(807)[:8], "little"))


@pytest.mark.parametrize("length", [48, 40])
def test_a_state_with_a_partial_block_is_exported_as_announced(length: int) -> None:
    partial = BlockStored(WIDE.fingerprint, 0, LONG.at(length), LONG.root, length)
    index = index_of(WIDE, partial, *state(WIDE, length))
    copy = Index()
    copy.register(NODE, cluster=EAST, epoch=1, layouts=[WIDE])
    copy.apply(NODE, [announcement for _, announcement in index.announcements(lambda name: True)])
    for target in (index, copy):
        assert target.digests(NODE) == index.digests(NODE)
        assert usable(target, query(limit=length, stated=(length,)))[0][0] == length
        assert target.match(query()).odd_lengths == ((length,) if length % 16 else ())


def test_a_partial_block_without_a_state_gives_no_odd_length() -> None:
    partial = BlockStored(WIDE.fingerprint, 0, LONG.at(72), LONG.at(64), 72)
    assert index_of(WIDE, partial).match(query()).odd_lengths == ()


def test_a_sweep_frees_the_tables_of_forgotten_nodes() -> None:
    index = index_of(HYBRID, *blocks(HYBRID, range(1600)), *state(HYBRID, 800))
    later = layouts("n", group("full_attention", 16))[0]
    index.register(AgentName("n2"), cluster=EAST, epoch=1, layouts=[later])
    index.forget(NODE)
    index.sweep(1000)
    assert index.models() == {"n"}
    tell(index, HYBRID, *blocks(HYBRID, range(320)), *state(HYBRID, 160))
    index.sweep(1000)
    assert usable(index, query()) == [(160, 320, "state")]
