"""Has hot prefixes copied to further nodes, in the clusters whose record this manager writes; drains nodes that leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prfaas import logs
from prfaas.index.membership import Member, Node
from prfaas.index.query import MatchResult, Query
from prfaas.kv.layout import prefix_bytes
from prfaas.manager.config import ManagerConfig
from prfaas.manager.operations.commands import Copies, CopyOrder, Purpose
from prfaas.manager.state.traffic import Popularity
from prfaas.manager.state.world import World
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
FORGET_RATIO = 0.05  # of the rate that wants a second holder: what is asked for less is not worth remembering
FULL_LINK_RATIO = 0.5  # of what a link is known to carry at most: beyond it copies leave it to live transfers
PRIORITY = 1  # on the wire: a sixteenth of an ordinary request's share
MAX_LOOKED_AT = 64  # prefixes a step, 100 us each
MAX_DRAINED = 256  # prefixes
log = logs.get("manager.rebalancing")


class Rebalancer:
    """Feeds the pure policy once a step and orders what it says."""

    def __init__(
        self,
        config: ManagerConfig,
        *,
        world: World,
        copies: Copies,
        writes: Callable[[ClusterName], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`writes` says whether this manager writes a cluster's record, so that its agents listen here."""
        self._config = config
        self._world = world
        self._copies = copies
        self._writes = writes
        self._clock = clock
        self._state = RebalanceState()
        self.popularity = Popularity()
        self._limits = RebalanceLimits(
            egress_bytes_per_second=config.rebalance_bytes_per_second,
            intake_bytes_per_second=config.rebalance_node_bytes_per_second,
            hits_per_holder_per_second=1 / config.rebalance_hit_seconds,
            max_holders=config.rebalance_max_holders,
            repeat_seconds=config.rebalance_repeat_seconds,
        )

    def note(self, query: Query, answer: MatchResult) -> None:
        """Somebody asked for a prompt."""
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
        """One step."""
        now = self._clock()
        self.popularity.forget_below(self._limits.hits_per_holder_per_second * FORGET_RATIO, now=now)
        members = {member.node.name: member for member in self._world.live()}
        hottest = self.popularity.hottest(MAX_LOOKED_AT, self._limits.hits_per_holder_per_second, now=now)
        wanted = {_key(prefix): prefix for prefix, _ in hottest}
        hot = await self._looked_at(hottest, members)
        self._state, moves = step(self._state, hot, self._cast(members), now=now, limits=self._limits)
        for move in moves:
            self._order(wanted[move.key], move, members, "rebalance")

    def hot(self, num_prefixes: int = MAX_LOOKED_AT) -> list[dict[str, Any]]:
        """The prefixes that this manager was asked for most of late, for its pages."""
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

    async def _looked_at(
        self, hottest: Sequence[tuple[Prefix, float]], members: dict[AgentName, Member]
    ) -> list[HotPrefix]:
        """Prefixes as the policy sees them; between any two of them others are answered."""
        hot = []
        for prefix, rate in hottest:
            hot.append(self._hot(prefix, rate, members))
            await asyncio.sleep(0)
        return hot

    def _hot(self, prefix: Prefix, hits_per_second: float, members: dict[AgentName, Member]) -> HotPrefix:
        sizes = {name: size for name, its in members.items() if (size := _num_bytes(its.node, prefix))}
        holders, num_bytes = frozenset(self.holders(prefix)), max(sizes.values(), default=0)
        return HotPrefix(_key(prefix), hits_per_second, num_bytes, frozenset(sizes), holders & sizes.keys())

    def holders(self, prefix: Prefix) -> Iterator[AgentName]:
        """The nodes that hold all of it."""
        query = Query(prefix.model, prefix.units, prefix.num_tokens, ((prefix.num_tokens, prefix.end_hash),))
        answer = self._world.index.match(query)
        return (node.node for node in answer.nodes if node.usable_tokens == prefix.num_tokens)

    def _cast(self, members: dict[AgentName, Member]) -> Participants:
        clusters = {name: its.node.cluster for name, its in members.items()}
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
        self, prefix: Prefix, move: PlannedCopy, members: dict[AgentName, Member], purpose: Purpose
    ) -> asyncio.Future[CopyEnd]:
        return self._copies.order(
            CopyOrder(
                prefix,
                source=members[move.source].node,
                destination=members[move.destination].node,
                purpose=purpose,
                max_bytes=move.num_bytes,
                priority=PRIORITY,
                seconds=self._config.grant_seconds,
            )
        )

    # A node that leaves

    async def drain(self, name: AgentName, *, seconds: float) -> list[CopyEnd]:
        """Place nothing more on a node, and move what is hot and nowhere else; how each copy ended.

        What has not ended after `seconds` goes on by itself. The egress budget does not hold it up: the node leaves.

        Raises:
            IndexRefusal: the node is unknown or silent.
        """
        node = self._world.live_node(name)
        self._world.drain(name)
        members = {member.node.name: member for member in self._world.live()}
        hottest = self.popularity.hottest(MAX_DRAINED, 0.0, now=self._clock())
        prefixes = {_key(prefix): prefix for prefix, _ in hottest}
        chosen = drain_order(await self._looked_at(hottest, members), name)
        heirs = self._heirs(node, members)
        orders = [
            self._order(prefixes[its.key], PlannedCopy(its.key, name, heir, its.num_bytes), members, "drain")
            for number, its in enumerate(chosen)
            if (able := [heir for heir in heirs if heir in its.nodes])
            for heir in [able[number % len(able)]]
        ]
        log.info("node.drains", node=name, num_prefixes=len(orders))
        done, _ = await asyncio.wait(orders, timeout=seconds) if orders else (set(), set())
        return [its.result() for its in done]

    def _heirs(self, node: Node, members: dict[AgentName, Member]) -> list[AgentName]:
        """The nodes that stay, those of the same cluster if there are any."""
        staying = [its.node for name, its in sorted(members.items()) if name not in self._world.leaving]
        near = [its.name for its in staying if its.cluster == node.cluster]
        return near or [its.name for its in staying]


def _key(prefix: Prefix) -> PrefixKey:
    return prefix.model, prefix.end_hash


def _num_bytes(node: Node, prefix: Prefix) -> int:
    """What the prefix has on all ranks of a node; 0 when it has no layout of the model."""
    return sum(prefix_bytes(layout, prefix.num_tokens) for layout in node.layouts if layout.model == prefix.model)


def _full_links(members: dict[AgentName, Member]) -> Iterator[tuple[ClusterName, ClusterName]]:
    """Pairs of clusters between which some link is down or more than half full; what was never seen busy is not."""
    for member in members.values():
        for link in member.figures.links:
            peer = members.get(link.peer)
            if peer is None or peer.node.cluster == member.node.cluster:
                continue
            is_full = 0 < FULL_LINK_RATIO * link.capacity_bytes_per_second < link.bytes_per_second
            if link.is_down or (link.queued_bytes and is_full):
                yield member.node.cluster, peer.node.cluster
