"""Prefix copies to other nodes, by commands of a manager.

    commanded ──grant, layout and blocks are here──▶ travelling ──all acknowledged, or failure──▶ ended, reported
                                                       └─ memory free ──▶ its blocks may be evicted again
    commanded ──no grant, no layout, or a block is not in memory──▶ ended, reported

A manager repeats a command until it has heard of the outcome. So an ended copy is remembered, and not carried out again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prfaas.agent.links import wire_priority
from prfaas.agent.transfer.grant_check import (
    GrantCheck,
    TransferRefused,
    check_granted_bytes,
    refusal_reason,
    seconds_left,
)
from prfaas.agent.transfer.log import TransferLog, TransferRecord
from prfaas.agent.transfer.open_body import CopiedPrefix, OpenBody
from prfaas.agent.transfer.placement import Placement, place
from prfaas.agent.transfer.plan import TransferPlan, make_plan
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.errors import GrantError, RemoteProtocolError
from prfaas.grants import Grant
from prfaas.hashing import NO_HASH, prefix_hash
from prfaas.kv.layout import is_well_formed, prefix_groups
from prfaas.transport.sender.api import SendCompleted, SendEvent, SendFailed, SendMemoryFree, SendRequest
from prfaas.transport.sender.link import Link
from prfaas.types import AgentName, CopyCommand, CopyEnd, GroupBlocks, Prefix, TransferId

MIN_DEADLINE_SECONDS = 0.1
MAX_ENDS = 4096  # About 200 bytes each.


@dataclass(eq=False)
class _PrefixCopy:
    """One copy that is being sent."""

    command: CopyCommand
    placement: Placement
    link: Link
    record: TransferRecord


class PrefixCopies:
    """All prefix copies from this node. Runs on the agent's loop."""

    def __init__(
        self,
        *,
        grant_check: GrantCheck,
        pool: Pool,
        arenas: Callable[[], list[Arena]],
        link_to: Callable[[str, AgentName], Link],
        transfer_log: TransferLog,
        report: Callable[[CopyEnd], None],
    ) -> None:
        """`arenas` returns those that may be copied. `report` gets the outcome of each command, also of a repeated one."""
        self._grant_check = grant_check
        self._pool = pool
        self._arenas = arenas
        self._link_to = link_to
        self._log = transfer_log
        self._report = report
        self._ends: dict[TransferId, CopyEnd] = {}  # Oldest first.
        self._copies: dict[TransferId, _PrefixCopy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def take(self, command: CopyCommand) -> None:
        """Carry out a command. The end of a repeated one is reported again."""
        if (end := self._ends.get(command.transfer_id)) is not None:
            self._report(end)
        elif command.transfer_id not in self._copies:
            try:
                self._start(command, self._check(command))
            except (GrantError, RemoteProtocolError, TransferRefused) as error:
                self._end(CopyEnd(command.transfer_id, refusal_reason(error), str(error)))

    def _check(self, command: CopyCommand) -> Grant:
        """Return the command's grant.

        Raises:
            GrantError: The grant is invalid or for another prefix.
            RemoteProtocolError: The prefix is malformed.
        """
        grant = self._grant_check.as_source(command.grant, "copy", command.transfer_id)
        prefix = command.prefix
        granted = (grant.prefix_hash, grant.prompt_hash, grant.num_tokens)
        if granted != (prefix_hash(prefix), prefix.end_hash, prefix.num_tokens):
            raise GrantError("other_prefix", "the grant is for another prefix")
        if not is_well_formed(prefix):
            raise RemoteProtocolError("prefix", f"{len(prefix.units)} bytes of hashes for {prefix.num_tokens} tokens")
        return grant

    def _start(self, command: CopyCommand, grant: Grant) -> None:
        """Send all blocks of the prefix on all ranks of one engine's shape.

        Raises:
            GrantError: The blocks have more bytes than granted.
            TransferRefused: No engine has this model's layouts, or a block is not in memory.
        """
        shapes = list(_complete_shapes(self._arenas(), command.prefix.model))
        if not shapes:
            model, agent = command.prefix.model, self._grant_check.agent
            raise TransferRefused("no_layout", f"no engine on {agent} has a layout of {model!r}")
        for arenas in shapes:
            plan = self._plan(arenas, command.prefix, grant)
            placement = place(self._pool, plan, arenas, may_allocate=False)
            if placement is not None:
                self._send(command, grant, placement)
                return
        raise TransferRefused("evicted", "a block of this prefix is not in memory")

    def _plan(self, arenas: tuple[Arena, ...], prefix: Prefix, grant: Grant) -> TransferPlan:
        plan = make_plan(tuple(arena.layout for arena in arenas), self._groups(arenas[0], prefix), grant.num_tokens)
        check_granted_bytes(plan.total_bytes, grant)
        return plan

    def _groups(self, arena: Arena, prefix: Prefix) -> tuple[GroupBlocks, ...]:
        """Return the prefix's blocks, with the parent of the first block (model and tenant) from this pool."""
        groups = prefix_groups(arena.layout, prefix)
        first = [(blocks.group, blocks.hashes[0]) for blocks in groups if blocks.parent == NO_HASH and blocks.hashes]
        found = (self._pool.find(arena, group, block_hash) for group, block_hash in first)
        slot = next((slot for slot in found if slot is not None), None)
        return (
            groups
            if slot is None
            else prefix_groups(arena.layout, prefix, root=self._pool.identity(arena, slot).parent)
        )

    def _send(self, command: CopyCommand, grant: Grant, placement: Placement) -> None:
        plan, link = placement.plan, self._link_to(grant.destination_address, grant.destination)
        priority = wire_priority(command.priority)
        record = self._log.begin(plan, command.transfer_id, "out", grant.destination, priority=priority)
        self._copies[command.transfer_id] = _PrefixCopy(command, placement, link, record)
        copied = CopiedPrefix(command.prefix.units, plan.root)
        link.open(
            SendRequest(
                transfer_id=command.transfer_id,
                open_body=OpenBody(command.grant, plan.fingerprints, plan.layouts, copied=copied).encode(),
                object_bytes=plan.object_bytes,
                source=placement.memory,
                priority=priority,
                deadline_seconds=max(MIN_DEADLINE_SECONDS, seconds_left(grant)),
            )
        )
        for objects in plan.ranges:
            if objects.blocks.num_blocks:
                link.ready(
                    command.transfer_id,
                    first_object=objects.first_object,
                    num_objects=objects.blocks.num_blocks,
                    offset_bytes=0,
                    length_bytes=objects.group.block_bytes,
                )

    def forget(self, model: str) -> None:
        """Cancel all copies of a model: its blocks were computed with earlier weights."""
        message = "the blocks of this model were forgotten"
        for copy in self._copies.values():
            if copy.command.prefix.model == model:
                copy.link.cancel(copy.command.transfer_id, "cancelled", message)

    def on_event(self, event: SendEvent) -> None:
        """Take an event of a link; events of other transfers are ignored."""
        copy = self._copies.get(TransferId(event.transfer_id))
        if copy is None:
            return
        self._log.follow(copy.record, event)
        if isinstance(event, SendCompleted):
            self._log.complete(copy.record)
            moved_bytes = copy.record.payload_bytes - copy.record.held_bytes
            self._end(CopyEnd(copy.command.transfer_id, "completed", "", moved_bytes, copy.record.held_bytes))
        elif isinstance(event, SendFailed):
            self._end(CopyEnd(copy.command.transfer_id, event.reason, event.message))
        elif isinstance(event, SendMemoryFree):
            del self._copies[copy.command.transfer_id]
            copy.placement.release()

    def _end(self, end: CopyEnd) -> None:
        """Report a new outcome and remember it."""
        self._ends[end.transfer_id] = end
        if len(self._ends) > MAX_ENDS:
            del self._ends[next(iter(self._ends))]
        self._report(end)


def _complete_shapes(arenas: list[Arena], model: str) -> Iterator[tuple[Arena, ...]]:
    """Yield a model's arenas by rank, for each shape of engine whose ranks are all here."""
    shapes: dict[tuple[str, int], dict[int, Arena]] = {}
    for arena in arenas:
        if arena.layout.model == model:
            shard = arena.layout.shard
            shapes.setdefault((arena.layout.packing, shard.size), {})[shard.rank] = arena
    for (_, size), ranks in shapes.items():
        if len(ranks) == size:
            yield tuple(ranks[rank] for rank in range(size))
