"""What another agent offers to send: which blocks, and for which slots here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from prfaas import tracing
from prfaas.agent.layouts_here import LayoutsHere
from prfaas.agent.plan import OpenBody, TransferPlan, make_plan
from prfaas.agent.refusal import Refusal
from prfaas.agent.transfer_log import TransferRecord
from prfaas.cachepool.arena import Arena
from prfaas.cachepool.layout import Layout
from prfaas.cachepool.prefix import is_well_formed, prefix_groups
from prfaas.cachepool.repack import Side
from prfaas.errors import GrantError, RemoteProtocolError
from prfaas.grants import Grant
from prfaas.hashing import prefix_hash
from prfaas.transport.inbound import OpenRequest
from prfaas.types import GroupBlocks, Prefix, TransferId


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


def offer_of(request: OpenRequest, grant: Grant, layouts: LayoutsHere) -> Offer:
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
