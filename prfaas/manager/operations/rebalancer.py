"""Rebalancer of hot prefixes, for the clusters whose record this manager writes, and drain of nodes that leave."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prfaas import logs
from prfaas.index.membership import Member, Node
from prfaas.index.query import MatchResult, Query
from prfaas.kv.layout import prefix_groups
from prfaas.manager.config import GRANT_SECONDS, ManagerConfig
from prfaas.manager.operations.commands import Copies, CopyOrder, Purpose
from prfaas.manager.state.world import World
from prfaas.scheduler.popularity import Popularity
from prfaas.scheduler.rebalance import (
    HotPrefix,
    Participants,
    PlannedCopy,
    PrefixKey,
    RebalanceLimits,
    RebalanceState,
    drain_order,
    step,
)
from prfaas.types import AgentName, ClusterName, CopyEnd, Prefix

STEP_SECONDS = 0.5
FORGET_RATIO = 0.05  # Prefixes below this share of the rate that needs a second holder are forgotten.
FULL_LINK_RATIO = 0.5  # Above this share of a link's capacity, copies leave it to live transfers.
PRIORITY = 1  # Weight on the wire: a sixteenth of an ordinary request.
MAX_LOOKED_AT = 64  # Prefixes per step, 100 us each.
MAX_DRAINED = 256  # Prefixes per drained node.
MAX_HOLDERS = 8
REPEAT_SECONDS = 300.0  # A node that evicted a prefix does not get it again for so long.
HITS_PER_HOLDER_PER_SECOND = 1.0
INTAKE_RATIO = 0.5  # A node receives at most this share of its cluster's egress budget.
log = logs.get("manager.rebalancing")


class Rebalancer:
    """Runs the scheduler's pure rebalancing policy, and orders the copies that it returns."""

    def __init__(
        self,
        config: ManagerConfig,
        *,
        world: World,
        copies: Copies,
        writes: Callable[[ClusterName], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`writes` returns whether this manager writes a cluster's record, so that the agents listen here."""
        self._config = config
        self._world = world
        self._copies = copies
        self._writes = writes
        self._clock = clock
        self._state = RebalanceState()
        self.popularity = Popularity()
        self._limits = RebalanceLimits(
            egress_bytes_per_second=config.rebalance_bytes_per_second,
            intake_bytes_per_second=INTAKE_RATIO * config.rebalance_bytes_per_second,
            hits_per_holder_per_second=HITS_PER_HOLDER_PER_SECOND,
            max_holders=MAX_HOLDERS,
            repeat_seconds=REPEAT_SECONDS,
        )

    def note(self, query: Query, answer: MatchResult) -> None:
        """Count the request for a prompt."""
        if answer.nodes and self._config.rebalance_bytes_per_second:
            self.popularity.hit(
                query.model,
                query.units,
                answer.nodes[0].usable_tokens,
                checkpoints=query.checkpoints,
                now=self._clock(),
            )

    async def run(self) -> None:
        """Rebalance until cancelled."""
        while True:
            await self.rebalance()
            await asyncio.sleep(STEP_SECONDS)

    async def rebalance(self) -> None:
        """Run one step."""
        now = self._clock()
        self.popularity.forget_below(self._limits.hits_per_holder_per_second * FORGET_RATIO, now=now)
        members = {member.node.name: member for member in self._world.heard()}
        hottest = self.popularity.hottest(MAX_LOOKED_AT, self._limits.hits_per_holder_per_second, now=now)
        wanted = {_key(prefix): prefix for prefix, _ in hottest}
        hot = await self._examine(hottest, members)
        self._state, copies = step(self._state, hot, self._participants(members), now=now, limits=self._limits)
        for planned in copies:
            self._order(wanted[planned.key], planned, members, "rebalance")

    def hot(self, num_prefixes: int = MAX_LOOKED_AT) -> list[dict[str, Any]]:
        """Return the prefixes with the most requests of late, for pages."""
        return [
            {
                "hash": prefix.end_hash.hex(),
                "model": prefix.model,
                "num_tokens": prefix.num_tokens,
                "hits_per_second": rate,
                "holders": sorted(self.holders(prefix)),
            }
            for prefix, rate in self.popularity.hottest(num_prefixes, 0.0, now=self._clock())
        ]

    async def _examine(
        self, hottest: Sequence[tuple[Prefix, float]], members: dict[AgentName, Member]
    ) -> list[HotPrefix]:
        """Return prefixes as the policy sees them, and let other tasks run in between."""
        hot = []
        for prefix, rate in hottest:
            hot.append(self._hot(prefix, rate, members))
            await asyncio.sleep(0)
        return hot

    def _hot(self, prefix: Prefix, hits_per_second: float, members: dict[AgentName, Member]) -> HotPrefix:
        sizes = {name: size for name, member in members.items() if (size := _num_bytes(member.node, prefix))}
        holders, num_bytes = frozenset(self.holders(prefix)), max(sizes.values(), default=0)
        return HotPrefix(_key(prefix), hits_per_second, num_bytes, frozenset(sizes), holders & sizes.keys())

    def holders(self, prefix: Prefix) -> Iterator[AgentName]:
        """Yield the nodes that hold the whole prefix in memory, from which it can be copied."""
        query = Query(prefix.model, prefix.units, prefix.num_tokens, ((prefix.num_tokens, prefix.end_hash),))
        answer = self._world.index.match(query, tier="memory")
        return (node.node for node in answer.nodes if node.usable_tokens == prefix.num_tokens)

    def _participants(self, members: dict[AgentName, Member]) -> Participants:
        clusters = {name: member.node.cluster for name, member in members.items()}
        return Participants(
            clusters,
            senders=frozenset(name for name, cluster in clusters.items() if self._writes(cluster)),
            leaving=self._world.leaving,
            full_links=frozenset(_full_links(members)),
            under_way=tuple(
                PlannedCopy(_key(order.prefix), order.source.name, order.destination.name, order.max_bytes)
                for order in self._copies.orders()
            ),
        )

    def _order(
        self, prefix: Prefix, planned: PlannedCopy, members: dict[AgentName, Member], purpose: Purpose
    ) -> asyncio.Future[CopyEnd]:
        return self._copies.order(
            CopyOrder(
                prefix,
                source=members[planned.source].node,
                destination=members[planned.destination].node,
                purpose=purpose,
                max_bytes=planned.num_bytes,
                priority=PRIORITY,
                seconds=GRANT_SECONDS,
            )
        )

    async def drain(self, name: AgentName, *, seconds: float) -> list[CopyEnd]:
        """Place nothing more on a node, and copy its hot prefixes that no other node has.

        Return the ends of the copies. Copies that are not finished after `seconds` continue. The egress budget does not
        apply, since the node leaves.

        Raises:
            IndexRefusal: the node is unknown or silent.
        """
        node = self._world.live_node(name)
        self._world.drain(name)
        members = {member.node.name: member for member in self._world.heard()}
        hottest = self.popularity.hottest(MAX_DRAINED, 0.0, now=self._clock())
        prefixes = {_key(prefix): prefix for prefix, _ in hottest}
        chosen = drain_order(await self._examine(hottest, members), name)
        heirs = self._heirs(node, members)
        orders = []
        for number, hot in enumerate(chosen):
            if able := [heir for heir in heirs if heir in hot.nodes]:
                planned = PlannedCopy(hot.key, name, able[number % len(able)], hot.num_bytes)
                orders.append(self._order(prefixes[hot.key], planned, members, "drain"))
        log.info("node.drain_started", node=name, num_prefixes=len(orders))
        done, _ = await asyncio.wait(orders, timeout=seconds) if orders else (set(), set())
        return [order.result() for order in done]

    def _heirs(self, node: Node, members: dict[AgentName, Member]) -> list[AgentName]:
        """Return the nodes that stay, those of the same cluster if there are any."""
        staying = [member.node for name, member in sorted(members.items()) if name not in self._world.leaving]
        near = [heir.name for heir in staying if heir.cluster == node.cluster]
        return near or [heir.name for heir in staying]


def _key(prefix: Prefix) -> PrefixKey:
    return prefix.model, prefix.end_hash


def _num_bytes(node: Node, prefix: Prefix) -> int:
    """Return the bytes of a prefix on all ranks of a node; 0 if the node has no layout of the model."""
    layouts = [layout for layout in node.layouts if layout.model == prefix.model]
    return sum(
        layout.groups[blocks.group].block_bytes * blocks.num_blocks
        for layout in layouts
        for blocks in prefix_groups(layout, prefix)
    )


def _full_links(members: dict[AgentName, Member]) -> Iterator[tuple[ClusterName, ClusterName]]:
    """Yield pairs of clusters with a link that is down, or more than half full. Idle links are never full."""
    for member in members.values():
        for link in member.figures.links:
            peer = members.get(link.peer)
            if peer is None or peer.node.cluster == member.node.cluster:
                continue
            is_full = 0 < FULL_LINK_RATIO * link.capacity_bytes_per_second < link.bytes_per_second
            if link.is_down or (link.queued_bytes and is_full):
                yield member.node.cluster, peer.node.cluster
