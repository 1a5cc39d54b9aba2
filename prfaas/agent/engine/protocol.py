"""Messages between an engine and its agent over the Unix socket.

An engine opens one connection from its scheduler and one from each worker rank. Every message is a u32 length
(little-endian) and a msgpack array `[name, fields...]`. No side waits for an answer: requests carry an id, mostly the
transfer's, and answers come in any order. Until then the scheduler tells the engine "not yet". File descriptors of
arena, ring and eventfd travel with `Attached`.

    worker     Attach(layout) ──▶ Attached + fds | Refused
    scheduler  Attach          ──▶ Attached       | Refused

    send       Send ──▶ SendOpened (a slot per block) | TransferFailed
               worker copies layers into the slots and writes LAYER_READY, FORWARD_ENDED to the ring
               REQUEST_ENDED on the ring of every rank, or Cancel if no rank was told to copy
               ◀── TransferDone | TransferFailed
    store      Store ──▶ SendOpened | TransferFailed; then as for send, but nothing leaves this machine
    look up    Lookup (hashes of the prompt) ──▶ LookedUp (lengths that this pool can serve)
               Promised (the router's prediction compared with the lookup)
               Hold (the blocks of one length) ──▶ ReceiveReady | TransferFailed; then as for receive
    receive    Receive ──▶ (the transfer may have begun before) ReceiveReady (a slot per block) | TransferFailed
               worker copies the slots into engine blocks and compares generations
               Release: the engine no longer reads the slots, or never will
    chunks     FindBlocks ──▶ BlocksFound, from a tier below another store of the engine; then Store or Hold
    reset      Forget (a model) ──▶ Forgotten
    liveness   Heartbeat ──▶ Alive (the agent has read all earlier messages; progress of the engine's claims)

While the scheduler waits for anything, it sends heartbeats. It gives up all waits for an agent that is silent, and the
agent learns so from the messages that it reads when it wakes: Release and Cancel for what was given up, and claims without
groups for later requests. The agent never writes to an engine's memory, and the scheduler ignores answers about
transfers that it gave up. So a late answer cannot reach a request that went on.

When a connection dies, the agent releases what the engine reads. Slots that ranks may be writing to stay until every rank
reports that it stopped. A rank reports so once a scheduler that has attached again plans a step (SCHEDULER_REATTACHED).
The slots also become free when the engine's last connection has gone, as when its process dies. A scheduler that attaches
again ends its earlier connection together with its unread messages.
"Layer ready" is a 32-byte entry in a shared-memory ring, announced by an eventfd (see ring.py).
"""

import types
import typing
from dataclasses import dataclass, fields
from typing import Any, Literal

import msgpack

from prfaas.errors import RemoteProtocolError
from prfaas.types import BlockHash, FailureReason, GroupBlocks, TransferId

PROTOCOL_VERSION = 2
# 1M tokens in units of 16 are 1 MiB of hashes for each group.
MAX_MESSAGE_BYTES = 16 << 20
LENGTH_BYTES = 4
# In a slot list: the agent holds this block already, so the worker does not copy it.
HELD = -1

AttachRole = Literal["scheduler", "worker"]


@dataclass(frozen=True)
class Message:
    """Base of the messages."""


@dataclass(frozen=True)
class Attach(Message):
    """First message of every connection.

    `layout` is `Layout.to_dict()` from a worker, None from a scheduler. `pins_arena`: a device will access the arena by
    physical address, so its pages must not move. Tensor-parallel ranks with equal KV attach as replicas of one rank of the
    layout. All of them read its arena; replica 0 alone writes. `node` is the NUMA node of the worker's device.
    """

    version: int
    instance: str
    role: AttachRole
    rank: int
    layout: dict[str, Any] | None
    pins_arena: bool = False
    replica: int = 0
    num_replicas: int = 1
    node: int | None = None


@dataclass(frozen=True)
class Attached(Message):
    """Answer to `Attach`; a worker also gets the descriptors of its arena, those of its `siblings`, ring and ring eventfd."""

    agent: str
    num_slots: int
    # Distance between two slots in the arena.
    slot_bytes: int
    # Offset of slot 0; the generation table lies before it.
    header_bytes: int
    # Start of the agent. Slots and handles are invalid at an agent with another epoch.
    epoch: int = 0
    # Number of schedulers of this instance that attached before this scheduler.
    session: int = 0


@dataclass(frozen=True)
class Refused(Message):
    """Refusal of `Attach`; the agent closes the connection. `message` names the cause."""

    message: str


@dataclass(frozen=True)
class Send(Message):
    """Request to open a transfer to the agent that the grant names, with slots for its blocks."""

    transfer_id: TransferId
    grant: bytes
    groups: tuple[GroupBlocks, ...]
    # The leg's traceparent.
    trace: str = ""
    # The request's priority as in vLLM: a lower number is more urgent.
    priority: int = 0


@dataclass(frozen=True)
class SendOpened(Message):
    """Slots of an opened transfer or store.

    `slots[rank][i][j]` takes block j of `groups[i]`, or is HELD if the worker need not copy it. Ring entries name the
    transfer by `handle`.
    """

    transfer_id: TransferId
    handle: int
    slots: list[list[list[int]]]


@dataclass(frozen=True)
class Receive(Message):
    """Claim of a granted transfer's blocks; the engine's own `prompt_hash` must equal the granted hash.

    A claim without groups gives the transfer up: the engine will not load it.
    """

    transfer_id: TransferId
    grant: bytes
    prompt_hash: BlockHash
    groups: tuple[GroupBlocks, ...]
    # The leg's traceparent.
    trace: str = ""


@dataclass(frozen=True)
class ReceiveReady(Message):
    """Notice that all blocks are in host memory.

    `slots[rank][i][j]` holds block j of `groups[i]` at `generations[rank][i][j]`.
    """

    transfer_id: TransferId
    slots: list[list[list[int]]]
    generations: list[list[list[int]]]


@dataclass(frozen=True)
class Store(Message):
    """Request to keep computed blocks for later requests; the engine fills the slots of `SendOpened`."""

    transfer_id: TransferId
    num_tokens: int
    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True)
class Lookup(Message):
    """Question for the lengths of a prompt that this node holds.

    `root` and `units` are the prompt's hash chain, 16 bytes per hash, joined.
    """

    transfer_id: TransferId
    root: BlockHash
    units: bytes
    limit_tokens: int


@dataclass(frozen=True)
class LookedUp(Message):
    """Lengths that all KV groups can serve, longest first, each with the prompt's hash at that length.

    A length that is not a multiple of 16 is a candidate: the engine has the tokens and compares the hash.
    """

    transfer_id: TransferId
    # Pairs [num_tokens, hash].
    lengths: list[list[Any]]


@dataclass(frozen=True)
class FindBlocks(Message):
    """Question which blocks of group 0 this node holds, each by itself. `hashes` are joined."""

    transfer_id: TransferId
    hashes: bytes


@dataclass(frozen=True)
class BlocksFound(Message):
    """Answer to `FindBlocks`: one byte for each block, 1 if it is held."""

    transfer_id: TransferId
    held: bytes


@dataclass(frozen=True)
class Promised(Message):
    """Comparison of a decision's predicted cached tokens with the tokens that the engine found."""

    predicted_tokens: int
    found_tokens: int


@dataclass(frozen=True)
class Hold(Message):
    """Request to pin all blocks of one length; the answer is TransferFailed if a block is missing."""

    transfer_id: TransferId
    num_tokens: int
    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True)
class Heartbeat(Message):
    """Question whether the agent answers, and how far the engine's claims have come."""

    number: int


@dataclass(frozen=True)
class Alive(Message):
    """Answer to `Heartbeat`: the agent has read every earlier message of this connection.

    `claims` lists the claims whose sender has opened the transfer, and whose blocks are not complete:
    [transfer id, total bytes, missing bytes, seconds since the first byte, seconds since the latest byte or the OPEN].
    """

    number: int
    claims: list[list[Any]]


@dataclass(frozen=True)
class Release(Message):
    """Notice that the engine no longer reads this transfer's slots and no longer waits for it."""

    transfer_id: TransferId


@dataclass(frozen=True)
class Cancel(Message):
    """Notice that the request ended and no worker copies for it; an incomplete transfer fails."""

    transfer_id: TransferId


@dataclass(frozen=True)
class Forget(Message):
    """Request to drop all blocks computed for a model, because its weights may change."""

    # Also names the answer.
    transfer_id: TransferId
    model: str


@dataclass(frozen=True)
class Forgotten(Message):
    """Answer to `Forget`: the blocks are removed from memory, SSD and unfinished stores."""

    transfer_id: TransferId


@dataclass(frozen=True)
class TransferDone(Message):
    """Notice that the receiver acknowledged every byte; the sender's slots are free."""

    transfer_id: TransferId


@dataclass(frozen=True)
class TransferFailed(Message):
    """Notice that the transfer failed; the receiving engine computes the prompt itself."""

    transfer_id: TransferId
    reason: FailureReason
    message: str


_BY_NAME: dict[str, type[Any]] = {kind.__name__: kind for kind in Message.__subclasses__()}
_HINTS = {kind: typing.get_type_hints(kind) for kind in _BY_NAME.values()}


def encode(message: Message) -> bytes:
    """Return the message in its form on the socket, length included."""
    values = [_plain(getattr(message, spec.name)) for spec in fields(message)]
    body: bytes = msgpack.packb([type(message).__name__, *values])
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], GroupBlocks):
        return pack_groups(value)
    return value


def decode(body: bytes) -> Message:
    """Return the message inside one frame.

    Raises:
        RemoteProtocolError: The frame is not msgpack, its name is unknown, or a field has the wrong type.
    """
    try:
        name, *values = msgpack.unpackb(body)
        kind = _BY_NAME[name]
        hints = _HINTS[kind]
        # An older engine leaves out later fields, which have defaults.
        specs = fields(kind)[: len(values)]
        message: Message = kind(*(_typed(hints[spec.name], value) for spec, value in zip(specs, values, strict=True)))
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(
            "malformed", f"not a message of protocol version {PROTOCOL_VERSION}: {error!r}"
        ) from error
    return message


def _typed(hint: Any, value: Any) -> Any:
    """Return `value` as the type `hint`, or raise TypeError; users of nested lists check these."""
    if hint == tuple[GroupBlocks, ...]:
        return unpack_groups(value)
    origin = typing.get_origin(hint)
    if origin is Literal:
        if value not in typing.get_args(hint):
            raise TypeError(f"{value!r} is none of {typing.get_args(hint)}")
        return value
    if origin is types.UnionType:
        allowed = tuple(typing.get_origin(arg) or arg for arg in typing.get_args(hint))
    else:
        allowed = (getattr(hint, "__supertype__", origin or hint),)
    if not isinstance(value, allowed):
        raise TypeError(f"{value!r} is not {hint}")
    return value


def pack_groups(groups: tuple[GroupBlocks, ...]) -> list[Any]:
    """Return block lists in the form for msgpack, which OPEN on the wire uses too."""
    return [[group.group, group.first_block, b"".join(group.hashes), group.parent] for group in groups]


def unpack_groups(packed: Any) -> tuple[GroupBlocks, ...]:
    """Return the block lists that `pack_groups` packed.

    Raises:
        TypeError: `packed` has another form.
    """
    return tuple(_group_blocks(*item) for item in packed)


def _group_blocks(group: int, first_block: int, joined: bytes, parent: bytes) -> GroupBlocks:
    has_numbers = isinstance(group, int) and isinstance(first_block, int) and group >= 0 and first_block >= 0
    has_bytes = isinstance(joined, bytes) and isinstance(parent, bytes)
    if not has_numbers or not has_bytes or len(joined) % 16 or len(parent) != 16:
        raise TypeError("a block list is [group, first block, 16-byte hashes, hash of the block before]")
    hashes = tuple(BlockHash(joined[start : start + 16]) for start in range(0, len(joined), 16))
    return GroupBlocks(group=group, first_block=first_block, hashes=hashes, parent=BlockHash(parent))


class MessageBuffer:
    """Parser of the messages that arrive on one connection."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes.

        Raises:
            RemoteProtocolError: A message is malformed or longer than MAX_MESSAGE_BYTES.
        """
        self._pending += data
        messages = []
        while len(self._pending) >= LENGTH_BYTES:
            length = int.from_bytes(self._pending[:LENGTH_BYTES], "little")
            if length > MAX_MESSAGE_BYTES:
                raise RemoteProtocolError("too_long", f"a message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
            end = LENGTH_BYTES + length
            if len(self._pending) < end:
                break
            messages.append(decode(bytes(self._pending[LENGTH_BYTES:end])))
            del self._pending[:end]
        return messages
