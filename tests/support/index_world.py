"""A brute-force model of nodes and pools, and random histories that drive it and the real index alike."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from prfaas.hashing import HashChain, root_hash
from prfaas.index.inventory import Change, Inventory
from prfaas.index.memory.index import Index
from prfaas.index.query import MatchResult, Query
from prfaas.kv.group import KVGroup
from prfaas.kv.layout import Layout
from prfaas.kv.parts import LayerSlice
from prfaas.pool_events import BlockRemoved, BlocksRemoved, BlocksStored, BlockStored, PoolEvent, Tier
from prfaas.types import AgentName, BlockHash, ClusterName, Shard

Held = dict[tuple[bytes, int, Tier], dict[BlockHash, int]]  # (layout, group, tier) → hash → num_tokens


def group(kind: str, block_tokens: int, window_tokens: int | None = None) -> KVGroup:
    return KVGroup(kind, block_tokens, (LayerSlice("layer", 0, 64, "bfloat16", "token"),), window_tokens)


def layouts(model: str, *groups: KVGroup, size: int = 1) -> list[Layout]:
    return [Layout(model, "", Shard(rank, size), groups) for rank in range(size)]


TIERS: list[Tier] = ["memory", "memory", "ssd"]
FAMILIES = {
    "dense": layouts("dense", group("full_attention", 16)),
    "window": layouts("window", group("full_attention", 16), group("sliding_window", 16, 40)),
    "short windows": layouts("short windows", group("sliding_window", 16, 100), group("full_attention", 32)),
    "long windows": layouts("long windows", group("full_attention", 16), group("sliding_window", 48, 70)),
    "chunks": layouts("chunks", group("full_attention", 16), group("chunked_local", 16, 64)),
    "uneven chunks": layouts("uneven chunks", group("full_attention", 16), group("chunked_local", 48, 70)),
    "hybrid": layouts("hybrid", group("full_attention", 32), group("linear_state", 0)),
    "sharded": layouts("sharded", group("full_attention", 16), group("linear_state", 0), size=2),
    "all": layouts("all", group("full_attention", 16), group("sliding_window", 16, 50), group("linear_state", 0)),
}


@dataclass
class Node:
    name: AgentName
    cluster: ClusterName
    layouts: list[Layout]
    epoch: int = 1
    held: Held = field(default_factory=dict)
    inventory: Inventory = field(default_factory=Inventory)


def tokens_held(node: Node, layout: Layout, index: int, chain: HashChain) -> tuple[set[int], set[int]]:
    """Full blocks held of this chain, and exact lengths held, by looking at every one of them."""
    everything: dict[BlockHash, int] = {}
    for tier in ("memory", "ssd"):
        everything |= node.held.get((layout.fingerprint, index, tier), {})
    group = layout.groups[index]
    blocks, exact = set(), set()
    for block_hash, num_tokens in everything.items():
        if num_tokens <= chain.num_tokens and chain.at(num_tokens) == block_hash:
            if group.is_state or num_tokens % group.block_tokens:
                exact.add(num_tokens)
            else:
                blocks.add(num_tokens // group.block_tokens - 1)
    return blocks, exact


def serves(group: KVGroup, blocks: set[int], exact: set[int], length: int) -> bool:
    """The rule of one KV group at one length, token by token."""
    if group.is_state:
        return length in exact
    window = group.window_tokens or 0
    first = max(0, length - window + 1) if window else 0
    if group.kind == "chunked_local":
        first = length // window * window
    return all(
        position // group.block_tokens in blocks
        or (length in exact and position // group.block_tokens == length // group.block_tokens)
        for position in range(first, length)
    )


def usable_by_brute_force(node: Node, chain: HashChain, limit: int) -> int:
    """The longest prefix that all groups of all ranks of a node serve."""
    groups = node.layouts[0].groups
    parts = [
        (group, *tokens_held(node, rank, index, chain)) for rank in node.layouts for index, group in enumerate(groups)
    ]
    parts.sort(key=lambda part: not part[0].is_state)  # The groups that fail soonest come first.
    has_state = any(group.is_state for group in groups)
    for length in range(limit, 0, -1):
        if not has_state and any(length % group.block_tokens for group in groups):
            continue
        if all(serves(group, blocks, exact, length) for group, blocks, exact in parts):
            return length
    return 0


class World:
    """A few nodes in two clusters that serve one model, with a small tree of prompts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.family = self.random.choice(sorted(FAMILIES))
        self.index = Index()
        self.nodes = [self._node(number) for number in range(self.random.randint(1, 4))]
        self.prompts = [self._prompt([]) for _ in range(2)]

    def _node(self, number: int) -> Node:
        node = Node(AgentName(f"n{number}"), ClusterName(f"c{number % 2}"), FAMILIES[self.family])
        self._register(node)
        return node

    def _register(self, node: Node) -> None:
        for layout in node.layouts:
            node.inventory.add_layout(layout)
        self.index.register(node.name, cluster=node.cluster, epoch=node.epoch, layouts=node.layouts)

    def _prompt(self, start: list[int]) -> list[int]:
        num_tokens = self.random.choice([1, 15, 16, 17, 40, 100, 200, 1100])
        return start + [self.random.randrange(4) for _ in range(num_tokens)]

    def chain(self, prompt: list[int]) -> HashChain:
        return HashChain(root_hash(self.family), prompt)

    def step(self) -> None:
        often = [self.store, self.store, self.store, self.evict, self.fork]
        self.random.choice([*often, self.restart, self.reannounce, self.sweep, self.recover])()

    def fork(self) -> None:
        prompt = self.random.choice(self.prompts)
        self.prompts.append(self._prompt(prompt[: self.random.randint(0, len(prompt))]))

    def store(self) -> None:
        """A prefix of some prompt becomes cached: full blocks, windows, a state, a partial tail; sometimes parts are
        missing."""
        node = self.random.choice(self.nodes)
        prompt = self.random.choice(self.prompts)
        chain = self.chain(prompt)
        length = self.random.randint(1, len(prompt))
        if length >= 32 and self.random.random() < 0.5:
            length -= length % 32  # The blocks of every group end there.
        events: list[PoolEvent] = []
        for layout in node.layouts:
            for index in range(len(layout.groups)):
                if self.random.random() < 0.9:
                    events += self._blocks(layout, index, chain, length)
        if self.random.random() < 0.3:
            self.random.shuffle(events)
        self.report(node, events)

    def _blocks(self, layout: Layout, index: int, chain: HashChain, length: int) -> list[PoolEvent]:
        group = layout.groups[index]
        tier = self.random.choice(TIERS)
        if group.is_state:
            anchor = chain.at(length - length % 16)
            return [BlockStored(layout.fingerprint, index, chain.at(length), anchor, length, tier)]
        first = max(0, length - group.window_tokens) // group.block_tokens if group.window_tokens else 0
        ends = range((first + 1) * group.block_tokens, length + 1, group.block_tokens)
        events = [self._block(layout, index, chain, end, tier) for end in ends]
        if length % group.block_tokens and self.random.random() < 0.5:
            events.append(self._block(layout, index, chain, length, tier))
        return events

    def _block(self, layout: Layout, index: int, chain: HashChain, end: int, tier: Tier) -> PoolEvent:
        size = layout.groups[index].block_tokens
        parent = chain.at((end - 1) // size * size)
        return BlockStored(layout.fingerprint, index, chain.at(end), parent, end, tier)

    def evict(self) -> None:
        """Any blocks may go, also from the middle of a chain."""
        node = self.random.choice(self.nodes)
        events: list[PoolEvent] = []
        for (layout, index, tier), blocks in node.held.items():
            chosen = self.random.sample(sorted(blocks), k=min(len(blocks), self.random.choice([0, 0, 0, 1, 3, 40])))
            events += [BlockRemoved(layout, index, BlockHash(block), tier) for block in chosen]
        self.report(node, events)

    def restart(self) -> None:
        """The node comes back empty with a new epoch."""
        if self.random.random() < 0.2:
            node = self.random.choice(self.nodes)
            node.epoch += 1
            node.held, node.inventory = {}, Inventory()
            self._register(node)

    def reannounce(self) -> None:
        node = self.random.choice(self.nodes)
        self.index.reset(node.name)
        self.index.apply(node.name, node.inventory.everything())

    def recover(self) -> None:
        """Restart the manager: it has a snapshot, but not the announcements before it."""
        former, self.index = self.index, Index()
        for node in self.nodes:
            self.index.register(node.name, cluster=node.cluster, epoch=node.epoch, layouts=node.layouts)
        for name, announcement in former.announcements(lambda name: True):
            self.index.apply(name, [announcement])

    def sweep(self) -> None:
        self.index.sweep(self.random.choice([1, 1000]))

    def report(self, node: Node, events: list[PoolEvent]) -> None:
        for event in events:
            held = node.held.setdefault((event.layout, event.group, event.tier), {})
            if isinstance(event, BlockStored):
                held[event.block_hash] = event.num_tokens
            else:
                held.pop(event.block_hash, None)
        self.index.apply(node.name, node.inventory.apply(self._in_runs(node, events)))

    def _in_runs(self, node: Node, events: list[PoolEvent]) -> list[Change]:
        """As pools tell it: what follows on each other as one, most of the time."""
        sizes = {
            (layout.fingerprint, index): group.block_tokens
            for layout in node.layouts
            for index, group in enumerate(layout.groups)
        }
        told: list[Change] = []
        for event in events:
            longer = _longer(told[-1], event) if told and self.random.random() < 0.95 else None
            if longer is not None:
                told[-1] = longer
            else:
                told.append(_run_of_one(event, sizes[event.layout, event.group]))
        return told

    def ask(self, prompt: list[int], stated: Iterable[int]) -> MatchResult:
        """The answer to a query that states the hashes of these lengths."""
        chain = self.chain(prompt)
        checkpoints = tuple((length, chain.at(length)) for length in stated if 0 < length <= len(prompt))
        return self.index.match(Query(self.family, b"".join(chain.units), len(prompt), checkpoints))

    def ask_as_routers_do(self, prompt: list[int]) -> MatchResult:
        """The answer once the lengths that the first one hints at were stated."""
        return self.ask(prompt, self.ask(prompt, ()).odd_lengths)


def _run_of_one(event: PoolEvent, block_tokens: int) -> Change:
    where = (event.layout, event.group, (event.block_hash,))
    if isinstance(event, BlockRemoved):
        return BlocksRemoved(*where, event.tier)
    return BlocksStored(*where, event.parent, event.num_tokens, block_tokens, event.tier)


def _longer(run: Change, event: PoolEvent) -> Change | None:
    """The run with the block behind it, where it goes there."""
    if (run.layout, run.group, run.tier) != (event.layout, event.group, event.tier):
        return None
    if isinstance(run, BlocksRemoved) and isinstance(event, BlockRemoved):
        return replace(run, hashes=(*run.hashes, event.block_hash))
    if isinstance(run, BlocksStored) and isinstance(event, BlockStored) and event.parent == run.hashes[-1]:
        ends = run.num_tokens + len(run.hashes) * run.block_tokens
        return replace(run, hashes=(*run.hashes, event.block_hash)) if event.num_tokens == ends else None
    return None
