"""Operations of operators and routers that change a deployment, with permission check and audit log."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal

from prfaas import logs, metrics
from prfaas.errors import FencedError, IndexRefusal
from prfaas.grants import MAX_TRANSFER_BYTES
from prfaas.index.membership import Member
from prfaas.manager.config import GRANT_SECONDS, ManagerConfig
from prfaas.manager.operations.commands import Copies, CopyOrder
from prfaas.manager.operations.rebalancer import Rebalancer
from prfaas.manager.record.replication import Replication
from prfaas.manager.state.instances import decoded_models
from prfaas.manager.state.quiescence import requests_by_instance, unreported_instances, until_idle
from prfaas.manager.state.world import World, leaving_record, role_record, staying_record
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.translate import ordered_role_from, prefix_from
from prfaas.types import AgentName, InstanceRole

Action = Literal["drain", "undrain", "set_role"]
MAX_ACTIONS = 200
_audit = logs.get("manager.audit")


class Operators:
    """Names that may change the deployment. With TLS they are names of certificates."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        # Latest actions: Unix time, "operator", target, and words for people.
        self.actions: deque[tuple[float, str, str, str]] = deque(maxlen=MAX_ACTIONS)

    @contextmanager
    def act(self, who: str, action: Action, *, target: str, **details: str) -> Iterator[dict[str, object]]:
        """Check permission, and log and count the action of the block with its outcome and the details that it adds.

        Raises:
            IndexRefusal: `who` is not an operator, or the block raises it.
        """
        outcome, found = "failed", dict[str, object]()
        try:
            if who not in self._names:
                outcome = "refused"
                raise IndexRefusal(
                    "unauthenticated", f"{who} is not an operator (operators: {', '.join(sorted(self._names))})"
                )
            _audit.info("admin.action_started", who=who, action=action, target=target, **details)
            yield found
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "cut_off"  # The caller has left, or this manager stops.
            raise
        except FencedError:
            outcome = "elsewhere"  # The writer of the cluster does it, and logs it.
            raise
        finally:
            words = " ".join([action, *details.values()])
            self.actions.append((time.time(), "operator", target, f"{words} by {who}: {outcome.replace('_', ' ')}"))
            metrics.ADMIN_ACTIONS.labels(action=action, outcome=outcome).inc()
            _audit.info(
                "admin.action_ended", who=who, action=action, target=target, outcome=outcome, **details, **found
            )


class Operations:
    """Calls of operators and routers that change something. `who` is the caller's proven name."""

    def __init__(
        self,
        config: ManagerConfig,
        *,
        world: World,
        replication: Replication,
        copies: Copies,
        rebalancer: Rebalancer,
        changes_roles: bool,
    ) -> None:
        self._world = world
        self._replication = replication
        self._copies = copies
        self._rebalancer = rebalancer
        self._changes_roles = changes_roles
        self._one_role_order = asyncio.Lock()
        self.operators = Operators(config.operators)

    async def copy(self, request: pb.CopyRequest, who: str) -> pb.CopyResponse:
        check_is_no_node(self._world, who)
        check_is_time(request.timeout_seconds)
        source, destination = (self._world.live_node(AgentName(name)) for name in (request.source, request.destination))
        await self._replication.writer_for(source.cluster)
        ended = self._copies.order(
            CopyOrder(
                prefix_from(request.prefix),
                source=source,
                destination=destination,
                purpose="fetch" if request.is_fetch else "order",
                max_bytes=MAX_TRANSFER_BYTES,
                priority=request.priority,
                seconds=min(request.timeout_seconds or GRANT_SECONDS, GRANT_SECONDS),
                caller=who,
            )
        )
        # A caller that leaves must not cancel the copy for others.
        end = await asyncio.shield(ended)
        return pb.CopyResponse(
            outcome=end.outcome, message=end.message, moved_bytes=end.moved_bytes, held_bytes=end.held_bytes
        )

    async def drain(self, request: pb.DrainRequest, who: str) -> pb.DrainResponse:
        check_is_time(request.timeout_seconds)
        if who == request.node:
            return await self._drain(request)
        with self.operators.act(who, "drain", target=request.node) as found:
            ends = _now() + request.timeout_seconds
            self._check_is_replaceable(AgentName(request.node))
            response = await self._drain(request)
            after = await until_idle(self._world, AgentName(request.node), seconds=max(0.0, ends - _now()), clock=_now)
            response.num_requests_left = sum(requests_by_instance(after).values())
            response.num_engines_unknown = len(unreported_instances(after))
            found |= {
                "num_requests_left": response.num_requests_left,
                "num_engines_unknown": response.num_engines_unknown,
            }
        return response

    def _check_is_replaceable(self, name: AgentName) -> None:
        """Refuse to drain the only node that decodes a model, since its requests would go on.

        Raises:
            IndexRefusal: no other node decodes one of its models.
        """
        decoded = {member.node.name: decoded_models(member) for member in self._world.heard()}
        own, leaving = decoded.pop(name, frozenset()), self._world.leaving
        rest = own.difference(*(models for node, models in decoded.items() if node not in leaving))
        if rest:
            raise IndexRefusal(
                "malformed",
                f"no other node decodes {sorted(rest)[0]}, so that requests would go on: start another, or stop the agent",
            )

    async def _drain(self, request: pb.DrainRequest) -> pb.DrainResponse:
        node = self._world.live_node(AgentName(request.node))
        writer = await self._replication.writer_for(node.cluster)
        await writer.append(leaving_record(node))
        ends = await self._rebalancer.drain(node.name, seconds=request.timeout_seconds)
        completed = [end for end in ends if end.outcome == "completed"]
        return pb.DrainResponse(num_prefixes=len(completed), moved_bytes=sum(end.moved_bytes for end in completed))

    async def undrain(self, request: pb.UndrainRequest, who: str) -> pb.UndrainResponse:
        with self.operators.act(who, "undrain", target=request.node):
            node = self._world.live_node(AgentName(request.node))
            writer = await self._replication.writer_for(node.cluster)
            await writer.append(staying_record(node.name))
            self._world.undrain(node.name)
        return pb.UndrainResponse()

    async def set_role(self, request: pb.SetRoleRequest, who: str) -> pb.SetRoleResponse:
        check_is_time(request.timeout_seconds)
        with self.operators.act(who, "set_role", target=request.node, role=request.role) as found:
            role = ordered_role_from(request.role)
            seconds = request.timeout_seconds
            response = await self._change_roles(AgentName(request.node), role, seconds=seconds)
            found["num_requests_left"] = sum(change.num_requests_left for change in response.changes)
            found["num_engines_unknown"] = sum(change.is_load_unknown for change in response.changes)
        return response

    async def _change_roles(self, name: AgentName, role: InstanceRole | None, *, seconds: float) -> pb.SetRoleResponse:
        """Change the role of a node's instances and return what changed. Running requests have `seconds` to end.

        A role of None restores the role that each instance announces.

        Raises:
            FencedError: another manager writes the cluster.
            IndexRefusal: the node is unknown or silent, or its cluster would have no instance that decodes.
        """
        await self._replication.writer_for(self._world.live_node(name).cluster)
        async with self._one_role_order:
            before = self._world.live_member(name)
            after = self._roles_after(before, role)
            idle = await self._rest(before, seconds)
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

    async def _rest(self, member: Member, seconds: float) -> Member:
        cluster = member.node.cluster
        self._world.set_changing_role(cluster, frozenset(engine.instance for engine in member.node.engines))
        try:
            return await until_idle(self._world, member.node.name, seconds=seconds, clock=_now)
        finally:
            self._world.set_changing_role(cluster, frozenset())

    def _roles_after(self, member: Member, role: InstanceRole | None) -> list[InstanceRole]:
        """Return the roles after the change, or raise IndexRefusal if they are not possible."""
        node = member.node
        if self._changes_roles:
            raise IndexRefusal(
                "malformed", "the plan changes roles in this deployment (role_changes: apply) and would undo the order"
            )
        if node.cluster_kind == "prfaas" and role not in ("prefill", None):
            raise IndexRefusal("malformed", f"{node.name} is in a PrfaaS cluster, where all instances prefill")
        after = [role or engine.role for engine in self._world.live_node(node.name).engines]
        others = {
            engine.role
            for peer in self._world.live()
            if peer.node.cluster == node.cluster and peer.node.name != node.name
            for engine in peer.node.engines
        }
        if node.cluster_kind == "pd" and not {"decode", "both"} & {*after, *others}:
            raise IndexRefusal("malformed", f"no instance of {node.cluster} would decode")
        return after


def check_is_no_node(world: World, who: str) -> None:
    """Refuse a call that nodes may not make.

    Raises:
        IndexRefusal: the caller is a node.
    """
    if AgentName(who) in world.membership:
        raise IndexRefusal("unauthenticated", f"{who} is a node, and nodes may not make this call")


def check_is_time(seconds: float) -> None:
    """Refuse a number of seconds that is negative or not finite.

    Raises:
        IndexRefusal: the number is not allowed.
    """
    if not math.isfinite(seconds) or seconds < 0:
        raise IndexRefusal("malformed", f"timeout_seconds: {seconds} is not a duration")


def _now() -> float:
    return asyncio.get_running_loop().time()
