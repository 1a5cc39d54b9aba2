"""An operator gives a node's instances another role: they get nothing new until they are idle, then it is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.errors import IndexRefusal
from prfaas.index.membership import Engine, Member
from prfaas.manager.record.replication import Replication
from prfaas.manager.state.quiescence import live_member, requests_by_instance, unreported_instances, until_idle
from prfaas.manager.state.world import World, role_record
from prfaas.types import AgentName, ClusterName, InstanceId, InstanceRole


@dataclass(frozen=True)
class RoleChangeResult:
    """One instance's change; `num_requests_left` ran when it took the role, as far as its agent said what it runs."""

    instance: InstanceId
    before: InstanceRole
    after: InstanceRole
    num_requests_left: int
    is_load_unknown: bool


class RoleOrders:
    """Carries orders out, one after the other. `clock`: seconds that only go forward."""

    def __init__(
        self, world: World, *, replication: Replication, is_automatic: bool, clock: Callable[[], float]
    ) -> None:
        """`is_automatic`: the plan in force changes roles, and would change them back."""
        self._world, self._replication = world, replication
        self._is_automatic, self._clock = is_automatic, clock
        self._turn = asyncio.Lock()

    async def carry_out(self, name: AgentName, role: InstanceRole | None, *, seconds: float) -> list[RoleChangeResult]:
        """What changed; a role of None is the announced one. What runs has `seconds` to end.

        Raises:
            Fenced: another manager writes the cluster.
            IndexRefusal: the node is unknown or silent, or its cluster would be left without a stage.
        """
        await self._replication.writer_for(self._world.live_node(name).cluster)
        async with self._turn:
            before = live_member(self._world, name)
            after = self._check(before, role)
            self._world.turn(before.node.cluster, frozenset(engine.instance for engine in before.node.engines))
            try:
                idle = await until_idle(self._world, name, seconds=seconds, clock=self._clock)
            finally:
                self._world.turn(before.node.cluster, frozenset())
            writer = await self._replication.writer_for(before.node.cluster)  # the lease may have been lost meanwhile
            self._world.order_role(name, role)
            await writer.append(role_record(name, role))
        left, unknown = requests_by_instance(idle), unreported_instances(idle)
        return [
            RoleChangeResult(
                its.instance, its.role, new, left.get(its.instance, 0), is_load_unknown=its.instance in unknown
            )
            for its, new in zip(before.node.engines, after, strict=True)
        ]

    def _check(self, member: Member, role: InstanceRole | None) -> list[InstanceRole]:
        """The roles afterwards. Raises IndexRefusal when they cannot be."""
        node = member.node
        if self._is_automatic:
            raise IndexRefusal(
                "malformed", "the plan changes roles here (role_changes: apply), and would change it back"
            )
        if node.cluster_kind == "prfaas" and role not in ("prefill", None):
            raise IndexRefusal("malformed", f"{node.name} is in a PrfaaS cluster, where all instances prefill")
        announced = self._world.live_node(node.name).engines
        after = [role or its.role for its in announced]
        others = [its.role for other in self._world.live() for its in _engines_beside(other, node.name, node.cluster)]
        if node.cluster_kind == "pd" and not any(its in ("decode", "both") for its in [*others, *after]):
            raise IndexRefusal("malformed", f"nothing in {node.cluster} would decode")
        return after


def _engines_beside(member: Member, name: AgentName, cluster: ClusterName) -> tuple[Engine, ...]:
    return member.node.engines if member.node.cluster == cluster and member.node.name != name else ()
