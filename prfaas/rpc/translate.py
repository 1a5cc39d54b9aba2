"""Translation between messages of the wire and plain data of the index."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_args

import msgpack

from prfaas.errors import IndexRefusal, LayoutError
from prfaas.index.membership import Engine, EngineLoad, Figures, LinkFigures, Node
from prfaas.index.query import MatchResult, Query
from prfaas.index.segments import Announcement, Checkpoint, Digest, Holding, Segment
from prfaas.kv.layout import Layout, is_well_formed
from prfaas.pool_events import Tier
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.types import (
    AgentName,
    BlockHash,
    ClusterKind,
    ClusterName,
    CopyCommand,
    CopyEnd,
    CopyOutcome,
    FailureReason,
    InstanceId,
    InstanceRole,
    Prefix,
    TransferId,
)

Word = TypeVar("Word", bound=str)
Record = TypeVar("Record", LinkFigures, EngineLoad)
_CLUSTER_KINDS: tuple[ClusterKind, ...] = get_args(ClusterKind)
_ROLES: tuple[InstanceRole, ...] = get_args(InstanceRole)
_TIERS: tuple[Tier, ...] = get_args(Tier)
_OUTCOMES: tuple[CopyOutcome, ...] = ("completed", *get_args(FailureReason))


def node_message(node: Node, *, with_layouts: bool = True) -> pb.Node:
    layouts = [msgpack.packb(layout.to_dict()) for layout in node.layouts] if with_layouts else []
    engines = [
        pb.Engine(instance=engine.instance, url=engine.url, role=engine.role, model=engine.model)
        for engine in node.engines
    ]
    return pb.Node(
        name=node.name,
        cluster=node.cluster,
        cluster_kind=node.cluster_kind,
        wire_address=node.wire_address,
        epoch=node.epoch,
        layouts=layouts,
        engines=engines,
    )


def node_from(message: pb.Node) -> Node:
    """Decode a node.

    Raises:
        IndexRefusal: a field is missing or has no allowed value.
    """
    if not (message.name and message.cluster and message.epoch):
        raise IndexRefusal("malformed", "a node has a name, a cluster and an epoch")
    layouts = tuple(_layout(packed) for packed in message.layouts)
    return Node(
        AgentName(message.name),
        ClusterName(message.cluster),
        _word(_CLUSTER_KINDS, message.cluster_kind, "cluster kind"),
        message.wire_address,
        message.epoch,
        layouts,
        tuple(
            Engine(InstanceId(engine.instance), engine.url, _word(_ROLES, engine.role, "role"), engine.model)
            for engine in message.engines
        ),
    )


def _word(allowed: Sequence[Word], value: str, kind: str) -> Word:
    """Return a word of the wire as a value of its closed set."""
    for word in allowed:
        if word == value:
            return word
    raise IndexRefusal("malformed", f"{kind} {value!r} is not one of {', '.join(allowed)}")


def _layout(packed: bytes) -> Layout:
    try:
        return Layout.from_dict(msgpack.unpackb(packed))
    except (LayoutError, ValueError, msgpack.UnpackException) as error:
        raise IndexRefusal("malformed", f"layout: {error}") from error


ANNOUNCED = "announced"


def ordered_role_from(word: str) -> InstanceRole | None:
    """Decode an ordered role; None means the role that each instance announces.

    Raises:
        IndexRefusal: the word is not a role.
    """
    return None if word == ANNOUNCED else _word(_ROLES, word, "role")


def batch_message(sequence: int, announcements: Iterable[Announcement], *, reset: bool = False) -> pb.Batch:
    positions: dict[Holding, int] = {}
    changes = [
        _change(announcement, lambda holding: positions.setdefault(holding, len(positions)))
        for announcement in announcements
    ]
    return pb.Batch(sequence=sequence, reset=reset, holdings=map(_holding_message, positions), changes=changes)


def _change(announcement: Announcement, position: Callable[[Holding], int]) -> pb.Change:
    holding = position(announcement.holding)
    if isinstance(announcement, Segment):
        states = [pb.States(holding=position(where), bitmap=bitmap) for where, bitmap in announcement.states]
        return pb.Change(
            segment=pb.Segment(
                holding=holding,
                head=announcement.head,
                tails=announcement.tails,
                bitmap=announcement.bitmap,
                removed=not announcement.stored,
                states=states,
            )
        )
    return pb.Change(
        checkpoint=pb.Checkpoint(
            holding=holding,
            block_hash=announcement.block_hash,
            anchor=announcement.anchor,
            num_tokens=announcement.num_tokens,
            removed=not announcement.stored,
            head=announcement.head or b"",
        )
    )


def _holding_message(holding: Holding) -> pb.Holding:
    return pb.Holding(layout=holding.layout, group=holding.group, tier=holding.tier)


def _holding(message: pb.Holding) -> Holding:
    return Holding(message.layout, message.group, _word(_TIERS, message.tier, "tier"))


def announcements_from(batch: pb.Batch) -> list[Announcement]:
    """Decode the announcements of a batch.

    Raises:
        IndexRefusal: a change is empty, or names a holding that the batch lacks.
    """
    holdings = [_holding(message) for message in batch.holdings]
    return [_announcement(change, holdings) for change in batch.changes]


def _announcement(change: pb.Change, holdings: list[Holding]) -> Announcement:
    kind = change.WhichOneof("change")
    message = change.segment if kind == "segment" else change.checkpoint
    if kind is None or message.holding >= len(holdings):
        raise IndexRefusal("malformed", "a change is a segment or a checkpoint of one of the batch's holdings")
    holding = holdings[message.holding]
    if isinstance(message, pb.Segment):
        if any(states.holding >= len(holdings) for states in message.states):
            raise IndexRefusal("malformed", "states belong to one of the batch's holdings")
        states = tuple((holdings[each.holding], each.bitmap) for each in message.states)
        return Segment(holding, BlockHash(message.head), message.tails, message.bitmap, not message.removed, states)
    head = BlockHash(message.head) if message.head else None
    block_hash, anchor = BlockHash(message.block_hash), BlockHash(message.anchor)
    return Checkpoint(holding, block_hash, anchor, message.num_tokens, not message.removed, head)


def digest_messages(digests: Mapping[Holding, Digest]) -> list[pb.HoldingDigest]:
    return [
        pb.HoldingDigest(holding=_holding_message(holding), num_blocks=digest.num_blocks, total=digest.total)
        for holding, digest in digests.items()
    ]


def digests_from(messages: Iterable[pb.HoldingDigest]) -> dict[Holding, Digest]:
    return {_holding(message.holding): Digest(message.num_blocks, message.total) for message in messages}


def link_message(link: LinkFigures) -> pb.LinkFigures:
    return pb.LinkFigures(**vars(link))


def load_message(load: EngineLoad) -> pb.EngineLoad:
    return pb.EngineLoad(**vars(load))


def figures_from(links: Iterable[pb.LinkFigures], engines: Iterable[pb.EngineLoad]) -> Figures:
    return Figures(
        tuple(_with_fields_of(link, LinkFigures) for link in links),
        tuple(_with_fields_of(load, EngineLoad) for load in engines),
    )


def _with_fields_of(message: Any, kind: type[Record]) -> Record:
    """Decode a message into the class whose fields have the same names."""
    return kind(*(getattr(message, field.name) for field in fields(kind)))


def query_from(message: pb.MatchRequest) -> Query:
    stated = checkpoints_from(message.checkpoints)
    return Query(message.model, message.units, message.limit_tokens, stated)


def checkpoints_from(messages: Iterable[pb.StatedCheckpoint]) -> tuple[tuple[int, BlockHash], ...]:
    return tuple((message.num_tokens, BlockHash(message.hash)) for message in messages)


def answer_message(answer: MatchResult) -> pb.MatchResponse:
    return pb.MatchResponse(
        nodes=[pb.NodeMatch(**node._asdict()) for node in answer.nodes], odd_lengths=answer.odd_lengths
    )


def prefix_message(prefix: Prefix) -> pb.Prefix:
    return pb.Prefix(model=prefix.model, units=prefix.units, num_tokens=prefix.num_tokens, end_hash=prefix.end_hash)


def prefix_from(message: pb.Prefix) -> Prefix:
    """Decode a prefix.

    Raises:
        IndexRefusal: the hashes do not fit the length.
    """
    prefix = Prefix(message.model, message.units, message.num_tokens, BlockHash(message.end_hash))
    if not is_well_formed(prefix):
        raise IndexRefusal("alien_hash", f"{len(prefix.units)} bytes of unit hashes for {prefix.num_tokens} tokens")
    return prefix


def command_message(command: CopyCommand) -> pb.Command:
    copy = pb.Command.Copy(
        transfer_id=command.transfer_id,
        grant=command.grant,
        prefix=prefix_message(command.prefix),
        priority=command.priority,
    )
    return pb.Command(copy=copy)


def command_from(message: pb.Command) -> CopyCommand | None:
    """Decode a command; None for one of a newer manager. The agent that runs a copy checks its prefix."""
    if message.WhichOneof("command") != "copy":
        return None
    copy, prefix = message.copy, message.copy.prefix
    checked = Prefix(prefix.model, prefix.units, prefix.num_tokens, BlockHash(prefix.end_hash))
    return CopyCommand(TransferId(copy.transfer_id), copy.grant, checked, copy.priority)


def copy_end_message(end: CopyEnd) -> pb.ReportCommandsRequest.End:
    return pb.ReportCommandsRequest.End(**vars(end))


def copy_end_from(message: pb.ReportCommandsRequest.End) -> CopyEnd:
    """Decode the end of a command. An unknown failure of a newer agent counts as `protocol`."""
    outcome: CopyOutcome = next((word for word in _OUTCOMES if word == message.outcome), "protocol")
    return CopyEnd(TransferId(message.transfer_id), outcome, message.message, message.moved_bytes, message.held_bytes)
