"""Probes of the links from PrfaaS clusters to PD clusters whose rate nobody knows: plans have it before there is traffic.

The manager that writes a cluster's record orders them: one link of each path, one at a time for every cluster at either end,
and of the same path not again for `link_probe_seconds`, however the last one ended, nor, where this manager has routed
requests, before it has routed another: a link may be paid for by the byte. What a probe finds comes with its agent's figures,
as what a transfer finds does.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from prfaas import grants, logs, metrics
from prfaas.hashing import NO_HASH
from prfaas.index.membership import Node
from prfaas.manager.config import ManagerConfig
from prfaas.manager.planning.paths import Pair, Paths
from prfaas.manager.state.world import World
from prfaas.types import TRANSFER_ID_BYTES, AgentName, ClusterKind, ClusterName, CopyEnd, ProbeCommand, TransferId

PROBE_SECONDS = 30.0  # from order to end, connecting included; grants hold longer, as clocks differ
GRACE_SECONDS = 2.0  # so long its agent's word may take
_log = logs.get("manager.link_probes")


@dataclass(frozen=True)
class _Ordered:
    pair: Pair
    source: Node
    destination: Node
    command: ProbeCommand
    deadline: float  # on the clock


class LinkProbes:
    """The probes under way, by the node that sends. Single-threaded; nothing here waits."""

    def __init__(
        self,
        config: ManagerConfig,
        *,
        world: World,
        paths: Paths,
        secret: bytes,
        writes: Callable[[ClusterName], bool],
        num_requests: Callable[[], int],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`num_requests` were routed; `clock` only goes forward; `wall_clock` is seconds since 1970, which grants expire by."""
        self._max_bytes, self._repeat_seconds = config.link_probe_bytes, config.link_probe_seconds
        self._grant_seconds = config.grant_seconds
        self._world, self._paths, self._writes = world, paths, writes
        self._grant_key = grants.derive_key(secret, "grant")
        self._num_requests, self._clock, self._wall_clock = num_requests, clock, wall_clock
        self._under_way: dict[TransferId, _Ordered] = {}
        self._ordered_at: dict[Pair, tuple[float, int]] = {}  # on the clock, and requests until then
        self._num_ordered: Counter[Pair] = Counter()
        self.version = 0  # grows with every order, so that the streams of commands know that there is news

    def step(self) -> None:
        """Order what is due."""
        now = self._clock()
        for its in [its for its in self._under_way.values() if now >= its.deadline]:
            self._end(its, CopyEnd(its.command.transfer_id, "deadline", "its agent has not answered in time"))
        if self._max_bytes:
            for source in self._clusters("prfaas"):
                for destination in self._clusters("pd"):
                    if self._is_due((source, destination), now):
                        self._order((source, destination), now)

    def _clusters(self, kind: ClusterKind) -> list[ClusterName]:
        nodes = (member.node for member in self._world.live())
        return sorted({node.cluster for node in nodes if node.cluster_kind == kind and node.takes_probes})

    def _is_due(self, pair: Pair, now: float) -> bool:
        busy = {cluster for its in self._under_way.values() for cluster in its.pair}
        return (
            self._writes(pair[0])
            and busy.isdisjoint(pair)
            and not self._paths.carried_bytes_per_second(*pair)
            and self._is_worth_another(pair, now)
            and not self._paths.planned_bytes_per_second(*pair, within_seconds=self._repeat_seconds)
        )

    def _is_worth_another(self, pair: Pair, now: float) -> bool:
        if pair not in self._ordered_at:
            return True
        at, num_requests = self._ordered_at[pair]
        routed = self._num_requests()
        return now - at >= self._repeat_seconds and (not routed or routed > num_requests)

    def _order(self, pair: Pair, now: float) -> None:
        source, destination = (self._node(cluster, self._num_ordered[pair]) for cluster in pair)
        self._ordered_at[pair] = now, self._num_requests()
        self._num_ordered[pair] += 1
        transfer_id = TransferId(secrets.token_bytes(TRANSFER_ID_BYTES))
        grant = grants.Grant(
            transfer_id=transfer_id,
            source=source.name,
            destination=destination.name,
            destination_address=destination.wire_address,
            prompt_hash=NO_HASH,
            num_tokens=0,
            max_bytes=self._max_bytes,
            tenant="",
            expires_at=self._wall_clock() + self._grant_seconds,
            kind="probe",
        )
        command = ProbeCommand(transfer_id, grants.sign(grant, self._grant_key))
        deadline = now + PROBE_SECONDS + GRACE_SECONDS
        self._under_way[transfer_id] = _Ordered(pair, source, destination, command, deadline)
        self.version += 1

    def _node(self, cluster: ClusterName, number: int) -> Node:
        """One of a cluster's nodes; another number, another node."""
        nodes = [its.node for its in self._world.live() if its.node.cluster == cluster and its.node.takes_probes]
        return sorted(nodes, key=lambda node: node.name)[number % len(nodes)]

    def commands_of(self, source: AgentName) -> list[ProbeCommand]:
        """What this node has to do and has not said that it is done."""
        return [its.command for its in self._under_way.values() if its.source.name == source]

    def report(self, source: AgentName, end: CopyEnd) -> None:
        """An agent says how a probe ended; what is not under way, or not its own, is ignored."""
        its = self._under_way.get(end.transfer_id)
        if its is not None and its.source.name == source:
            self._end(its, end)

    def _end(self, its: _Ordered, end: CopyEnd) -> None:
        del self._under_way[its.command.transfer_id]
        metrics.MANAGER_LINK_PROBES.labels(outcome=end.outcome).inc()
        _log.info(
            "link.probed",
            source=its.source.name,
            destination=its.destination.name,
            outcome=end.outcome,
            moved_bytes=end.moved_bytes,
            message=end.message,
        )
