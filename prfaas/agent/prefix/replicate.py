"""Prefix copies that leave: a manager's command, blocks of this pool under a lease, their bytes in another agent's pool.

    taken ──grant, layout, blocks──▶ travelling ──all acknowledged, failure──▶ ended, reported
                                                     └─ the memory is free ──▶ its blocks may be evicted again
    taken ──blocks on the SSD alone──▶ promoting ──read into the pool──▶ travelling
    taken ──no grant, no layout, a block is gone──▶ ended, reported
An ended copy is remembered, so that a command that comes again is answered and not carried out again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prfaas import grants, metrics
from prfaas.agent.links import wire_priority
from prfaas.agent.prefix.lookup import LocalHoldings
from prfaas.agent.prefix.ssd import promote
from prfaas.agent.transfer.grant_check import Refusal
from prfaas.agent.transfer.log import TransferLog, TransferRecord
from prfaas.agent.transfer.placement import Placement, place_held
from prfaas.agent.transfer.plan import CopiedPrefix, OpenBody, TransferPlan, make_plan
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.pool import Pool
from prfaas.cachepool.ssd import SsdTier
from prfaas.errors import GrantError, RemoteProtocolError
from prfaas.grants import Grant
from prfaas.hashing import NO_HASH, prefix_hash
from prfaas.kv.layout import is_well_formed, prefix_groups
from prfaas.transport.sender.api import SendCompleted, SendEvent, SendFailed, SendMemoryFree, SendRequest
from prfaas.transport.sender.link import Link
from prfaas.types import AgentName, CopyCommand, CopyEnd, GroupBlocks, Prefix, TransferId

MAX_REMEMBERED = 4096  # ended copies, about 200 bytes each
MIN_DEADLINE_SECONDS = 0.1


@dataclass(eq=False)
class _Copy:
    """One copy under way."""

    command: CopyCommand
    placement: Placement
    link: Link
    record: TransferRecord


class PrefixCopies:
    """Every prefix copy that leaves this node. Runs on the agent's loop; link events are handed over to it."""

    def __init__(
        self,
        *,
        name: AgentName,
        grant_key: bytes,
        pool: Pool,
        arenas: Callable[[], list[Arena]],
        ssd: SsdTier | None,
        link_to: Callable[[str, AgentName], Link],
        transfer_log: TransferLog,
        report: Callable[[CopyEnd], None],
    ) -> None:
        """`arenas` are those whose blocks may leave. `report` hears how each command ended, once for each time that it came."""
        self._name = name
        self._grant_key = grant_key
        self._pool = pool
        self._arenas = arenas
        self._ssd = ssd
        self._link_to = link_to
        self._log = transfer_log
        self._report = report
        self._copies: dict[TransferId, _Copy] = {}
        self._promoting: dict[TransferId, CopyCommand] = {}  # their blocks are being read from the SSD
        self._ended: OrderedDict[TransferId, CopyEnd] = OrderedDict()

    def __len__(self) -> int:
        return len(self._copies) + len(self._promoting)

    def take(self, command: CopyCommand) -> None:
        """Carry out a command; of one that is under way its priority is taken, and one that has ended is reported again."""
        ended = self._ended.get(command.transfer_id)
        if ended is not None:
            self._report(ended)
        elif (copy := self._copies.get(command.transfer_id)) is not None:
            copy.record.priority = wire_priority(command.priority)
            copy.link.prioritise(command.transfer_id, copy.record.priority)
        elif command.transfer_id in self._promoting:
            self._promoting[command.transfer_id] = command
        else:
            self._start(command)

    def _start(self, command: CopyCommand) -> None:
        try:
            grant = self._check(command)
            self._place(command, grant)
        except GrantError as error:
            metrics.GRANTS_REFUSED.labels(reason=error.reason).inc()
            self._end(CopyEnd(command.transfer_id, "grant_refused", str(error)))
        except RemoteProtocolError as error:
            self._end(CopyEnd(command.transfer_id, "protocol", str(error)))
        except Refusal as refusal:
            self._end(CopyEnd(command.transfer_id, refusal.reason, str(refusal)))

    def _check(self, command: CopyCommand) -> Grant:
        grant = grants.verify_end(
            command.grant,
            self._grant_key,
            kind="copy",
            end="source",
            agent=self._name,
            transfer_id=command.transfer_id,
            now=time.time(),
        )
        prefix = command.prefix
        granted = (grant.prefix_hash, grant.prompt_hash, grant.num_tokens)
        if granted != (prefix_hash(prefix), prefix.end_hash, prefix.num_tokens):
            raise GrantError("other_prefix", "the grant is for another prefix")
        if not is_well_formed(prefix):
            raise RemoteProtocolError("prefix", f"{len(prefix.units)} bytes of hashes for {prefix.num_tokens} tokens")
        return grant

    def _place(self, command: CopyCommand, grant: Grant) -> None:
        """Send the prefix's blocks, all of them, on all ranks of one engine's shape, from the SSD where need be.

        Raises:
            GrantError: they are more bytes than the grant allows.
            Refusal: no engine has brought this model's layouts, or a block is gone.
        """
        families = list(_families(self._arenas(), command.prefix.model))
        if not families:
            raise Refusal("no_layout", f"no engine beside {self._name} has a layout of {command.prefix.model!r}")
        plans = [self._plan(arenas, command.prefix, grant) for arenas in families]
        for arenas, plan in zip(families, plans, strict=True):
            placement = place_held(self._pool, plan, arenas, owner=f"copy-{command.transfer_id.hex()}")
            if placement is not None:
                self._send(command, grant, placement)
                return
        if not any(self._promote(command, grant, its) for its in zip(plans, families, strict=True)):
            raise Refusal("evicted", "a block of this prefix is not here")

    def _plan(self, arenas: tuple[Arena, ...], prefix: Prefix, grant: Grant) -> TransferPlan:
        plan = make_plan(tuple(arena.layout for arena in arenas), self._groups(arenas[0], prefix), grant.num_tokens)
        if plan.total_bytes > grant.max_bytes:
            raise GrantError("too_large", f"{plan.total_bytes} bytes; the grant allows {grant.max_bytes}")
        return plan

    def _promote(self, command: CopyCommand, grant: Grant, its: tuple[TransferPlan, tuple[Arena, ...]]) -> bool:
        """Have the blocks read from the SSD and sent then; False when they are not there."""
        (plan, arenas), held = its, [LocalHoldings(self._pool, self._ssd, arena) for arena in its[1]]
        if self._ssd is None or not all(all(node.have(b.group, b.hashes)) for node in held for b in plan.groups):
            return False

        def done(placement: Placement | None) -> None:
            latest = self._promoting.pop(command.transfer_id, None)
            if latest is None:  # forgotten, which has been reported
                if placement is not None:
                    placement.release()
            elif placement is None:
                self._end(CopyEnd(command.transfer_id, "evicted", "a block of this prefix could not be read"))
            else:
                self._send(latest, grant, placement)

        promotion = promote(self._pool, self._ssd, plan, arenas, done=done)
        if promotion is not None:
            self._promoting[command.transfer_id] = command
            promotion.begin()
        return promotion is not None

    def _groups(self, arena: Arena, prefix: Prefix) -> tuple[GroupBlocks, ...]:
        """The prefix's blocks; what the first one hangs on (model and tenant) is as this pool has it."""
        groups = prefix_groups(arena.layout, prefix)
        first = [(blocks.group, blocks.hashes[0]) for blocks in groups if blocks.parent == NO_HASH and blocks.hashes]
        node = LocalHoldings(self._pool, self._ssd, arena)
        parents = [parent for group, its in first if (parent := node.parent(group, its)) is not None]
        return prefix_groups(arena.layout, prefix, root=parents[0]) if parents else groups

    def _send(self, command: CopyCommand, grant: Grant, placement: Placement) -> None:
        plan, link = placement.plan, self._link_to(grant.destination_address, grant.destination)
        record = TransferRecord(
            transfer_id=command.transfer_id,
            direction="out",
            peer=grant.destination,
            num_tokens=plan.num_tokens,
            payload_bytes=plan.total_bytes,
            attention_bytes=plan.attention_bytes,
            priority=wire_priority(command.priority),
        )
        self._copies[command.transfer_id] = _Copy(command, placement, link, self._log.begin(record))
        fingerprints = tuple(layout.fingerprint for layout in plan.layouts)
        copied = CopiedPrefix(command.prefix.units, plan.root)
        link.open(
            SendRequest(
                transfer_id=command.transfer_id,
                open_body=OpenBody(command.grant, fingerprints, plan.layouts, copied=copied).encode(),
                object_bytes=plan.object_bytes,
                source=placement.memory,
                priority=wire_priority(command.priority),
                deadline_seconds=max(MIN_DEADLINE_SECONDS, grant.expires_at - time.time()),
            )
        )
        for run in plan.runs:
            if run.blocks.num_blocks:
                link.ready(
                    command.transfer_id,
                    first_object=run.first_object,
                    num_objects=run.blocks.num_blocks,
                    offset_bytes=0,
                    length_bytes=run.group.block_bytes,
                )

    def forget(self, model: str) -> None:
        """What was computed before the weights of a model changed is not to reach another pool."""
        message = "what is held of this model is forgotten"
        for copy in self._copies.values():
            if copy.command.prefix.model == model:
                copy.link.cancel(copy.command.transfer_id, "cancelled", message)
        for transfer_id in [its for its, command in self._promoting.items() if command.prefix.model == model]:
            del self._promoting[transfer_id]
            self._end(CopyEnd(transfer_id, "cancelled", message))

    def on_event(self, event: SendEvent) -> None:
        """What a link says; of transfers that are no copies nothing happens."""
        copy = self._copies.get(TransferId(event.transfer_id))
        if copy is None:
            return
        self._log.follow(copy.record, event)
        if isinstance(event, SendCompleted):
            self._log.complete(copy.record)
            moved = copy.record.payload_bytes - copy.record.held_bytes
            self._end(CopyEnd(copy.command.transfer_id, "completed", "", moved, copy.record.held_bytes))
        elif isinstance(event, SendFailed):
            self._end(CopyEnd(copy.command.transfer_id, event.reason, event.message))
        elif isinstance(event, SendMemoryFree):
            del self._copies[copy.command.transfer_id]
            copy.placement.release()

    def _end(self, end: CopyEnd) -> None:
        metrics.COPIES.labels(outcome=end.outcome).inc()
        metrics.COPIED_BYTES.inc(end.moved_bytes)
        self._ended[end.transfer_id] = end
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._report(end)


def _families(arenas: list[Arena], model: str) -> Iterator[tuple[Arena, ...]]:
    """The arenas of a model by rank, for each shape of engine whose ranks are all here."""
    shapes: dict[tuple[str, int], dict[int, Arena]] = {}
    for arena in arenas:
        if arena.layout.model == model:
            shard = arena.layout.shard
            shapes.setdefault((arena.layout.packing, shard.size), {})[shard.rank] = arena
    for (_, size), ranks in shapes.items():
        if len(ranks) == size:
            yield tuple(ranks[rank] for rank in range(size))
