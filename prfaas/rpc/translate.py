"""Between the messages of the wire and the plain data of the index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

import msgpack

from prfaas.errors import IndexRefusal, LayoutError
from prfaas.index.membership import Engine, EngineLoad, Figures, LinkFigures, Node
from prfaas.index.query import MatchResult, Query
from prfaas.index.segments import Announcement, Checkpoint, Digest, Holding, Segment
from prfaas.kv.layout import Layout, is_well_formed
from prfaas.pool_events import POOL_TIERS, Tier
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
    PoolCommand,
    PoolOrder,
    Prefix,
    ProbeCommand,
    TransferId,
)


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
        hardware=node.hardware,
        takes_probes=node.takes_probes,
    )


def node_from(message: pb.Node) -> Node:
    """Raises:
    IndexRefusal: a field is missing or has no allowed value.
    """
    if not (message.name and message.cluster and message.epoch):
        raise IndexRefusal("malformed", "a node has a name, a cluster and an epoch")
    kind = _one_of(get_args(ClusterKind), message.cluster_kind, "cluster kind")
    layouts = tuple(_layout(packed) for packed in message.layouts)
    return Node(
        AgentName(message.name),
        ClusterName(message.cluster),
        "prfaas" if kind == "prfaas" else "pd",
        message.wire_address,
        message.epoch,
        layouts,
        tuple(_engine(engine) for engine in message.engines),
        message.hardware,
        message.takes_probes,
    )


def _one_of(allowed: tuple[str, ...], value: str, what: str) -> str:
    if value not in allowed:
        raise IndexRefusal("malformed", f"{what} {value!r} is none of {', '.join(allowed)}")
    return value


def _layout(packed: bytes) -> Layout:
    try:
        return Layout.from_dict(msgpack.unpackb(packed))
    except (LayoutError, ValueError, msgpack.UnpackException) as error:
        raise IndexRefusal("malformed", f"layout: {error}") from error


_ROLES: dict[str, InstanceRole] = {"prefill": "prefill", "decode": "decode", "both": "both"}
ANNOUNCED = "announced"
_TIERS: dict[str, Tier] = {"gpu": "gpu", "memory": "memory", "ssd": "ssd"}


def role_from(word: str) -> InstanceRole:
    """Raises IndexRefusal when it is none."""
    return _ROLES[_one_of(tuple(_ROLES), word, "role")]


def ordered_role_from(word: str) -> InstanceRole | None:
    """None: the one that each instance announces. Raises IndexRefusal when it is no role."""
    return None if word == ANNOUNCED else role_from(word)


def _engine(message: pb.Engine) -> Engine:
    role = role_from(message.role)
    return Engine(InstanceId(message.instance), message.url, role, message.model)


def batch_message(sequence: int, announcements: Iterable[Announcement], *, reset: bool = False) -> pb.Batch:
    positions: dict[Holding, int] = {}
    changes = [
        _change(announcement, lambda holding: positions.setdefault(holding, len(positions)))
        for announcement in announcements
    ]
    return pb.Batch(sequence=sequence, reset=reset, holdings=map(_holding_message, positions), changes=changes)


def _change(its: Announcement, position: Callable[[Holding], int]) -> pb.Change:
    holding = position(its.holding)
    if isinstance(its, Segment):
        states = [pb.States(holding=position(where), bitmap=bitmap) for where, bitmap in its.states]
        segment = pb.Segment(
            holding=holding, head=its.head, tails=its.tails, bitmap=its.bitmap, removed=not its.stored, states=states
        )
        return pb.Change(segment=segment)
    return pb.Change(
        checkpoint=pb.Checkpoint(
            holding=holding,
            block_hash=its.block_hash,
            anchor=its.anchor,
            num_tokens=its.num_tokens,
            removed=not its.stored,
            head=its.head or b"",
        )
    )


def _holding_message(holding: Holding) -> pb.Holding:
    return pb.Holding(layout=holding.layout, group=holding.group, tier=holding.tier)


def _holding(message: pb.Holding) -> Holding:
    return Holding(message.layout, message.group, _TIERS[_one_of(tuple(_TIERS), message.tier, "tier")])


def announcements_from(batch: pb.Batch) -> list[Announcement]:
    """Raises:
    IndexRefusal: a change names no holding of the batch, or says nothing.
    """
    holdings = [_holding(message) for message in batch.holdings]
    return [_announcement(change, holdings) for change in batch.changes]


def _announcement(change: pb.Change, holdings: list[Holding]) -> Announcement:
    kind = change.WhichOneof("change")
    its = change.segment if kind == "segment" else change.checkpoint
    if kind is None or its.holding >= len(holdings):
        raise IndexRefusal("malformed", "a change is a segment or a checkpoint of one of the batch's holdings")
    holding = holdings[its.holding]
    if isinstance(its, pb.Segment):
        if any(states.holding >= len(holdings) for states in its.states):
            raise IndexRefusal("malformed", "states belong to one of the batch's holdings")
        states = tuple((holdings[each.holding], each.bitmap) for each in its.states)
        return Segment(holding, BlockHash(its.head), its.tails, its.bitmap, not its.removed, states)
    head = BlockHash(its.head) if its.head else None
    return Checkpoint(holding, BlockHash(its.block_hash), BlockHash(its.anchor), its.num_tokens, not its.removed, head)


def digest_messages(digests: Mapping[Holding, Digest]) -> list[pb.HoldingDigest]:
    return [
        pb.HoldingDigest(holding=_holding_message(holding), num_blocks=digest.num_blocks, total=digest.total)
        for holding, digest in digests.items()
    ]


def digests_from(messages: Iterable[pb.HoldingDigest]) -> dict[Holding, Digest]:
    return {_holding(message.holding): Digest(message.num_blocks, message.total) for message in messages}


def link_message(its: LinkFigures) -> pb.LinkFigures:
    return pb.LinkFigures(**vars(its))


def load_message(its: EngineLoad) -> pb.EngineLoad:
    return pb.EngineLoad(**vars(its))


def figures_from(links: Iterable[pb.LinkFigures], engines: Iterable[pb.EngineLoad]) -> Figures:
    return Figures(tuple(map(_link, links)), tuple(map(_load, engines)))


def _link(message: pb.LinkFigures) -> LinkFigures:
    return LinkFigures(
        AgentName(message.peer),
        message.bytes_per_second,
        message.capacity_bytes_per_second,
        message.rtt_seconds,
        message.min_rtt_seconds,
        message.queued_bytes,
        message.retransmit_ratio,
        message.num_connections,
        message.is_down,
        message.queue_seconds,
        message.congestion,
        message.limit,
        message.is_probed,
        message.least_bytes_per_second,
    )


def _load(message: pb.EngineLoad) -> EngineLoad:
    return EngineLoad(InstanceId(message.instance), message.num_running, message.num_waiting, message.kv_usage_ratio)


def query_from(message: pb.MatchRequest) -> Query:
    stated = checkpoints_from(message.checkpoints)
    return Query(message.model, message.units, message.limit_tokens, stated, message.with_world)


def tiers_from(names: Iterable[str]) -> frozenset[Tier]:
    """The tiers that a question is about; those of the pool unless it names some.

    Raises:
        IndexRefusal: there is no such tier.
    """
    return frozenset(_TIERS[_one_of(tuple(_TIERS), name, "tier")] for name in names) or POOL_TIERS


def checkpoints_from(messages: Iterable[pb.StatedCheckpoint]) -> tuple[tuple[int, BlockHash], ...]:
    return tuple((message.num_tokens, BlockHash(message.hash)) for message in messages)


def answer_message(answer: MatchResult) -> pb.MatchResponse:
    return pb.MatchResponse(
        nodes=[pb.NodeMatch(**node._asdict()) for node in answer.nodes],
        clusters=[pb.ClusterMatch(**cluster._asdict()) for cluster in answer.clusters],
        odd_lengths=answer.odd_lengths,
        world=None if answer.world is None else pb.WorldMatch(**answer.world._asdict()),
    )


def prefix_message(its: Prefix) -> pb.Prefix:
    return pb.Prefix(model=its.model, units=its.units, num_tokens=its.num_tokens, end_hash=its.end_hash)


def prefix_from(message: pb.Prefix) -> Prefix:
    """Raises:
    IndexRefusal: the hashes are not those of a prefix of that length.
    """
    prefix = Prefix(message.model, message.units, message.num_tokens, BlockHash(message.end_hash))
    if not is_well_formed(prefix):
        raise IndexRefusal("alien_hash", f"{len(prefix.units)} bytes of unit hashes for {prefix.num_tokens} tokens")
    return prefix


def copy_message(its: CopyCommand) -> pb.Command:
    prefix = prefix_message(its.prefix)
    copy = pb.Command.Copy(transfer_id=its.transfer_id, grant=its.grant, prefix=prefix, priority=its.priority)
    return pb.Command(copy=copy)


def copy_command_from(message: pb.Command) -> CopyCommand | None:
    """None for a command of a newer manager. What is wrong with the prefix is for whoever carries it out to say."""
    if message.WhichOneof("command") != "copy":
        return None
    its = message.copy
    prefix = Prefix(its.prefix.model, its.prefix.units, its.prefix.num_tokens, BlockHash(its.prefix.end_hash))
    return CopyCommand(TransferId(its.transfer_id), its.grant, prefix, its.priority)


_ORDERS: dict[str, PoolOrder] = {order: order for order in get_args(PoolOrder)}


def pool_order_from(word: str) -> PoolOrder:
    """Raises:
    IndexRefusal: there is no such order.
    """
    if word not in _ORDERS:
        raise IndexRefusal("protocol", f"order: {word!r}; there are {', '.join(_ORDERS)}")
    return _ORDERS[word]


def pool_message(its: PoolCommand) -> pb.Command:
    return pb.Command(pool=pb.Command.Pool(command_id=its.command_id, end_hash=its.end_hash, order=its.order))


def pool_command_from(message: pb.Command) -> PoolCommand | None:
    """None for another command, and for an order of a newer manager."""
    its = message.pool
    if message.WhichOneof("command") != "pool" or its.order not in _ORDERS:
        return None
    return PoolCommand(TransferId(its.command_id), BlockHash(its.end_hash), _ORDERS[its.order])


def probe_message(its: ProbeCommand) -> pb.Command:
    return pb.Command(probe=pb.Command.Probe(transfer_id=its.transfer_id, grant=its.grant))


def probe_command_from(message: pb.Command) -> ProbeCommand | None:
    """None for another command."""
    if message.WhichOneof("command") != "probe":
        return None
    return ProbeCommand(TransferId(message.probe.transfer_id), message.probe.grant)


def copy_end_message(its: CopyEnd) -> pb.ReportCommandsRequest.End:
    return pb.ReportCommandsRequest.End(**vars(its))


_OUTCOMES: dict[str, CopyOutcome] = {
    "completed": "completed",
    "pinned": "pinned",
    **{reason: reason for reason in get_args(FailureReason)},
}


def copy_end_from(message: pb.ReportCommandsRequest.End) -> CopyEnd:
    """A newer agent's word for a failure counts as `protocol`."""
    outcome = _OUTCOMES.get(message.outcome, "protocol")
    return CopyEnd(TransferId(message.transfer_id), outcome, message.message, message.moved_bytes, message.held_bytes)
