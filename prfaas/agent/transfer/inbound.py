"""What an engine's scheduler asks before all of the engine's workers are attached: kept, in order, until they are.

After a restart of the agent that is the usual order: the scheduler's side comes back first, while workers may wait until
peers have been asked about their layout. In whose layout blocks are wanted is not known before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from prfaas import tracing
from prfaas.agent.engine.protocol import Receive, Send, TransferFailed
from prfaas.agent.engine.server import EngineConnection
from prfaas.agent.transfer.grant_check import Refusal
from prfaas.agent.transfer.layouts import LayoutRegistry
from prfaas.agent.transfer.log import TransferRecord
from prfaas.agent.transfer.placement import Placement
from prfaas.agent.transfer.plan import OpenBody, TransferPlan, make_plan
from prfaas.agent.transfer.repack import RepackJob, agree
from prfaas.cachepool.arena import Arena
from prfaas.errors import GrantError, RemoteProtocolError
from prfaas.grants import Grant
from prfaas.hashing import prefix_hash
from prfaas.kv.layout import Layout, is_well_formed, prefix_groups
from prfaas.kv.repack import Side
from prfaas.transport.protocol.messages import Ending
from prfaas.transport.receiver.admission import EndedTransfers
from prfaas.transport.receiver.api import OpenRequest, TransferStats
from prfaas.transport.receiver.transfers import shorten
from prfaas.types import GroupBlocks, Prefix, TransferId

MAX_EARLY = 1024  # of one engine: as many as it may hold parked while its workers attach


class PendingClaims:
    """Sends and receives that wait for their engine's workers; the engine itself gives up those that wait too long."""

    def __init__(self) -> None:
        self._by_engine: dict[EngineConnection, dict[TransferId, Send | Receive]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_engine.values()))

    def keep(self, engine: EngineConnection, message: Send | Receive) -> None:
        """Keep one, or answer it with TransferFailed when there are too many."""
        kept = self._by_engine.setdefault(engine, {})
        if len(kept) < MAX_EARLY:
            kept[message.transfer_id] = message
        else:
            text = f"the workers of {engine.attach.instance} are not all attached"
            engine.post(TransferFailed(message.transfer_id, "no_layout", text))

    def take(self, instance: str) -> list[tuple[EngineConnection, Send | Receive]]:
        """What an engine has asked, whose workers are all there: kept no longer."""
        engines = [engine for engine in self._by_engine if engine.attach.instance == instance]
        return [(engine, message) for engine in engines for message in self._by_engine.pop(engine).values()]

    def drop(self, engine: EngineConnection, transfer_id: TransferId) -> None:
        """The engine no longer wants this one."""
        self._by_engine.get(engine, {}).pop(transfer_id, None)

    def forget(self, engine: EngineConnection) -> None:
        """This connection has ended."""
        self._by_engine.pop(engine, None)


MAX_REMEMBERED = 1 << 16  # ended transfers whose grants have not expired, about 400 bytes each
MAX_CANCELLED = 1 << 12  # transfers that were cancelled before their grants came here, about 400 bytes each


class OutcomeCache:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._ended: dict[TransferId, tuple[float, Ending]] = {}  # until when it is remembered
        self._cancelled: EndedTransfers[Ending] = EndedTransfers(MAX_CANCELLED)

    def of(self, grant: Grant) -> Ending | None:
        """How its transfer has ended already, or why its sender gave it up before it came."""
        _, ending = self._ended.get(grant.transfer_id, (0.0, None))
        return ending or self._cancelled.get(grant.source, grant.transfer_id)

    def put(self, transfer_id: TransferId, ending: Ending, *, until: float) -> None:
        """A transfer has ended, whose grant is good until then."""
        self._ended[transfer_id] = until, _shortened(ending)

    def cancelled(self, peer: str, transfer_id: TransferId, ending: Ending) -> None:
        """A peer gives up a transfer that nobody here knows: it counts where the grant says that this peer sends it."""
        self._cancelled.put(peer, transfer_id, _shortened(ending))

    def expire(self, now: float) -> None:
        """Forget what no grant asks for any more, and the oldest beyond what is kept."""
        while self._ended:
            oldest = next(iter(self._ended))
            if self._ended[oldest][0] >= now and len(self._ended) <= MAX_REMEMBERED:
                return
            del self._ended[oldest]


def _shortened(ending: Ending) -> Ending:
    """What it says may be a peer's words."""
    return replace(ending, message=shorten(ending.message))


@dataclass(frozen=True)
class Offer:
    """`arenas[rank]` has the slots for the blocks of that rank of `plan`; `trace` is the sender's traceparent."""

    plan: TransferPlan
    arenas: tuple[Arena, ...]
    peer: str
    trace: str

    @property
    def side(self) -> Side:
        """What is to agree with the blocks that a reader expects."""
        return Side(self.plan.layouts, self.plan.groups)

    def record(self, transfer_id: TransferId, *, held_bytes: int) -> TransferRecord:
        """Of its arrival, which begins now."""
        its = self.plan
        span = tracing.continued(
            "agent.receive",
            self.trace,
            transfer_id=transfer_id.hex(),
            peer=self.peer,
            num_tokens=its.num_tokens,
            payload_bytes=its.total_bytes,
        )
        return TransferRecord(
            transfer_id=transfer_id,
            direction="in",
            peer=self.peer,
            num_tokens=its.num_tokens,
            payload_bytes=its.total_bytes,
            attention_bytes=its.attention_bytes,
            held_bytes=held_bytes,
            span=span,
        )


def offer_of(request: OpenRequest, grant: Grant, layouts: LayoutRegistry) -> Offer:
    """What an OPEN offers whose grant is good.

    Raises:
        GrantError: it is a copy of another prefix than was granted.
        LayoutError: a layout of it is malformed.
        RemoteProtocolError: it has another form.
        Refusal: nobody here can read it, or it is not what was granted.
    """
    wants_layouts = partial(layouts.wants_description, request.peer_name)
    opened = OpenBody.decode(request.open_body, wants_layouts=wants_layouts)
    arenas = layouts.arenas(opened)
    groups = _groups(opened, arenas[0].layout, grant)
    try:
        plan = make_plan(tuple(arena.layout for arena in arenas), groups, grant.num_tokens)
    except RemoteProtocolError as error:
        raise Refusal("protocol", str(error)) from error
    if list(request.object_bytes) != plan.object_bytes or plan.total_bytes > grant.max_bytes:
        raise Refusal("protocol", "the objects are not those of the grant and the layout")
    return Offer(plan, arenas, request.peer_name, opened.trace)


def _groups(opened: OpenBody, layout: Layout, grant: Grant) -> tuple[GroupBlocks, ...]:
    """The blocks that an OPEN offers: those that it lists, or, of a copy, those of the prefix that its grant was signed for.

    Raises:
        GrantError: the copy is of another prefix.
    """
    if opened.copied is None:
        return opened.groups
    prefix = Prefix(layout.model, opened.copied.units, grant.num_tokens, grant.prompt_hash)
    if not is_well_formed(prefix) or prefix_hash(prefix) != grant.prefix_hash:
        raise GrantError("other_prefix", "the grant is for another prefix")
    return prefix_groups(layout, prefix, root=opened.copied.root)


@dataclass(eq=False)
class InboundTransfer:
    """One transfer that arrives. `claimed` are the blocks that the reader expects, `arenas` those of its ranks."""

    grant: Grant
    deadline: float  # monotonic seconds
    open_until: float  # monotonic seconds: its sender opens it by then, or never will
    reader: EngineConnection | None = None
    claimed: Side | None = None
    arenas: tuple[Arena, ...] = ()
    placement: Placement | None = None  # of what arrives
    repacking: RepackJob | None = None  # into the reader's layout, where that is another one
    record: TransferRecord | None = None
    is_partial: bool = False  # its sender was told to leave out what the reader holds in its own layout
    complete: bool = False
    reading: bool = False  # the engine was told the slots and has not released them
    memory_free: bool = True  # the transport cannot write to the slots
    delivery: tracing.Span = tracing.NO_SPAN  # from the claim until the engine has read the slots

    def expects(self, its: Side) -> bool:
        """Whether nothing is known of this transfer that speaks against these blocks."""
        placed = None if self.placement is None else Side(self.placement.plan.layouts, self.placement.plan.groups)
        known = (side for side in (self.claimed, placed) if side is not None)
        return all(agree(its, side, num_tokens=self.grant.num_tokens) for side in known)

    def received(self, stats: TransferStats) -> None:
        """What it has cost on the wire goes to its record, if anything of it came."""
        if self.record is not None:
            self.record.wire_bytes, self.record.checksum_failures = stats.wire_bytes, stats.checksum_failures

    @property
    def is_copy(self) -> bool:
        """Nobody claims it: it ends with its last byte."""
        return self.grant.kind == "copy"

    @property
    def is_vouched_for(self) -> bool:
        """Whether the hashes of what arrives are another's word than its sender's: the reader's, or, of a copy, its grant's."""
        its, claimed = self.placement, self.claimed
        return self.is_copy or (its is not None and claimed is not None and claimed.groups == its.plan.groups)

    @property
    def delivered(self) -> Placement | None:
        """The blocks that the reader gets."""
        return self.repacking.target if self.repacking is not None else self.placement

    def __repr__(self) -> str:
        return f"<Inbound {self.grant.transfer_id.hex()[:8]} complete={self.complete} reading={self.reading}>"
