"""Role changes that operators order: the node gets no new work until it is idle, then the new role is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prfaas.errors import IndexRefusal
from prfaas.index.membership import Member
from prfaas.manager.record.replication import Replication
from prfaas.manager.state.quiescence import requests_by_instance, unreported_instances, until_idle
from prfaas.manager.state.world import World, role_record
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.types import AgentName, ClusterName, InstanceRole


class RoleOrders:
    """Carries out operators' orders one after another. `clock` is monotonic."""

    def __init__(
        self, world: World, *, replication: Replication, is_automatic: bool, clock: Callable[[], float]
    ) -> None:
        """With `is_automatic`, the plan changes roles itself, and orders are refused."""
        self._world, self._replication = world, replication
        self._is_automatic, self._clock = is_automatic, clock
        self._one_at_a_time = asyncio.Lock()

    async def carry_out(self, name: AgentName, role: InstanceRole | None, *, seconds: float) -> pb.SetRoleResponse:
        """Change the role of a node's instances and return what changed. Running requests have `seconds` to end.

        A role of None restores the role that each instance announces.

        Raises:
            FencedError: another manager writes the cluster.
            IndexRefusal: the node is unknown or silent, or its cluster would have no instance that decodes.
        """
        await self._replication.writer_for(self._world.live_node(name).cluster)
        async with self._one_at_a_time:
            before = self._world.live_member(name)
            after = self._check(before, role)
            idle = await self._drain(before, seconds)
            # The lease may have been lost during the drain.
            writer = await self._replication.writer_for(before.node.cluster)
            self._world.order_role(name, role)
            await writer.append(role_record(name, role))
        left, unknown = requests_by_instance(idle), unreported_instances(idle)
        changes = [
            pb.SetRoleResponse.Change(
                instance=engine.instance,
                before=engine.role,
                after=new_role,
                num_requests_left=left.get(engine.instance, 0),
                is_load_unknown=engine.instance in unknown,
            )
            for engine, new_role in zip(before.node.engines, after, strict=True)
        ]
        return pb.SetRoleResponse(changes=changes)

    async def _drain(self, member: Member, seconds: float) -> Member:
        cluster = member.node.cluster
        self._world.set_changing_role(cluster, frozenset(engine.instance for engine in member.node.engines))
        try:
            return await until_idle(self._world, member.node.name, seconds=seconds, clock=self._clock)
        finally:
            self._world.set_changing_role(cluster, frozenset())

    def _check(self, member: Member, role: InstanceRole | None) -> list[InstanceRole]:
        """Return the roles after the change, or raise IndexRefusal if they are not possible."""
        node = member.node
        if self._is_automatic:
            raise IndexRefusal(
                "malformed", "the plan changes roles in this deployment (role_changes: apply) and would undo the order"
            )
        if node.cluster_kind == "prfaas" and role not in ("prefill", None):
            raise IndexRefusal("malformed", f"{node.name} is in a PrfaaS cluster, where all instances prefill")
        after = [role or engine.role for engine in self._world.live_node(node.name).engines]
        if node.cluster_kind == "pd" and not {"decode", "both"} & {
            *after,
            *self._roles_of_others(node.name, node.cluster),
        }:
            raise IndexRefusal("malformed", f"no instance of {node.cluster} would decode")
        return after

    def _roles_of_others(self, name: AgentName, cluster: ClusterName) -> set[InstanceRole]:
        return {
            engine.role
            for member in self._world.live()
            if member.node.cluster == cluster and member.node.name != name
            for engine in member.node.engines
        }
