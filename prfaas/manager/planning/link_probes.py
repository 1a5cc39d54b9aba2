"""Probes of the links from PrfaaS clusters to PD clusters, which measure a rate before there is traffic.

The manager that writes the PrfaaS cluster's record orders them. It probes one link of each path, and one path at a time
per cluster. It probes a path again only after `REPEAT_SECONDS`, and only if a request was routed in between,
because a link may be paid for by the byte. The result arrives with the figures of the agent.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from prfaas import grants, logs, metrics
from prfaas.hashing import NO_HASH
from prfaas.index.membership import Node
from prfaas.manager.config import GRANT_SECONDS, ManagerConfig
from prfaas.manager.planning.paths import Pair, Paths
from prfaas.manager.state.world import World
from prfaas.types import TRANSFER_ID_BYTES, AgentName, ClusterKind, ClusterName, CopyEnd, ProbeCommand, TransferId

PROBE_SECONDS = 30.0  # From order to end, including the connection; grants hold longer because clocks differ.
REPEAT_SECONDS = 240.0  # Earliest repetition of a probe of the same path.
GRACE_SECONDS = 2.0  # Allowance for the report of the agent.
_log = logs.get("manager.link_probes")


@dataclass(frozen=True)
class _PendingProbe:
    pair: Pair
    source: Node
    destination: Node
    command: ProbeCommand
    deadline: float


class LinkProbes:
    """Probes in progress, by the sending node. Single-threaded and never waits."""

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
        """`num_requests` returns the number of routed requests.

        `clock` is monotonic; `wall_clock` is Unix time, for grants.
        """
        self._max_bytes = config.link_probe_bytes
        self._world, self._paths, self._writes = world, paths, writes
        self._grant_key = grants.derive_key(secret, "grant")
        self._num_requests, self._clock, self._wall_clock = num_requests, clock, wall_clock
        self._under_way: dict[TransferId, _PendingProbe] = {}
        # Monotonic time of the order, and the number of requests routed until then.
        self._ordered_at: dict[Pair, tuple[float, int]] = {}
        self._num_ordered: Counter[Pair] = Counter()
        self.version = 0

    def step(self) -> None:
        """Order the probes that are due, and end those that are overdue."""
        now = self._clock()
        for probe in [probe for probe in self._under_way.values() if now >= probe.deadline]:
            self._end(probe, CopyEnd(probe.command.transfer_id, "deadline", "the agent did not report in time"))
        if self._max_bytes:
            for source in self._clusters("prfaas"):
                for destination in self._clusters("pd"):
                    if self._is_due((source, destination), now):
                        self._order((source, destination), now)

    def _clusters(self, kind: ClusterKind) -> list[ClusterName]:
        nodes = (member.node for member in self._world.heard())
        return sorted({node.cluster for node in nodes if node.cluster_kind == kind and node.takes_probes})

    def _is_due(self, pair: Pair, now: float) -> bool:
        busy = {cluster for probe in self._under_way.values() for cluster in probe.pair}
        return (
            self._writes(pair[0])
            and busy.isdisjoint(pair)
            and not self._paths.carried_bytes_per_second(*pair)
            and self._is_worth_another(pair, now)
            and not self._paths.planned_bytes_per_second(*pair, within_seconds=REPEAT_SECONDS)
        )

    def _is_worth_another(self, pair: Pair, now: float) -> bool:
        if pair not in self._ordered_at:
            return True
        at, num_requests = self._ordered_at[pair]
        routed = self._num_requests()
        return now - at >= REPEAT_SECONDS and (not routed or routed > num_requests)

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
            expires_at=self._wall_clock() + GRANT_SECONDS,
            kind="probe",
        )
        command = ProbeCommand(transfer_id, grants.sign(grant, self._grant_key))
        deadline = now + PROBE_SECONDS + GRACE_SECONDS
        self._under_way[transfer_id] = _PendingProbe(pair, source, destination, command, deadline)
        self.version += 1

    def _node(self, cluster: ClusterName, number: int) -> Node:
        """Return a node of a cluster; consecutive numbers rotate over the nodes."""
        nodes = (member.node for member in self._world.heard())
        able = [node for node in nodes if node.cluster == cluster and node.takes_probes]
        return sorted(able, key=lambda node: node.name)[number % len(able)]

    def commands_of(self, source: AgentName) -> list[ProbeCommand]:
        return [probe.command for probe in self._under_way.values() if probe.source.name == source]

    def report(self, source: AgentName, end: CopyEnd) -> None:
        probe = self._under_way.get(end.transfer_id)
        if probe is not None and probe.source.name == source:
            self._end(probe, end)

    def _end(self, probe: _PendingProbe, end: CopyEnd) -> None:
        del self._under_way[probe.command.transfer_id]
        metrics.MANAGER_LINK_PROBES.labels(outcome=end.outcome).inc()
        _log.info(
            "link.probed",
            source=probe.source.name,
            destination=probe.destination.name,
            outcome=end.outcome,
            moved_bytes=end.moved_bytes,
            message=end.message,
        )
