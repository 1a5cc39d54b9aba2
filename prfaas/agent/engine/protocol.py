"""What the connector and the agent say to each other over the Unix socket and the ring.

Theory of operation. An engine opens two kinds of connection to its agent: one from the scheduler side and one from each
worker rank. Every message is a u32 length (little-endian) and a msgpack array `[name, fields...]`. Nobody waits for an
answer: requests carry an id (mostly the transfer's), answers come whenever they come, and the scheduler side meanwhile
says "not yet" to the engine. File descriptors (arena, ring, eventfd) ride on `Attached`.

    worker     Attach(layout) ──▶ Attached + fds | Refused
    scheduler  Attach          ──▶ Attached       | Refused

    sending    Send ──▶ SendOpened (a slot per block) | TransferFailed
               worker copies layers into the slots and writes LAYER_READY, FORWARD_ENDED to the ring
               REQUEST_ENDED on the ring of every rank, or Cancel when no rank was ever told to copy
               ◀── TransferDone | TransferFailed
    storing    Store ──▶ SendOpened | TransferFailed; then as sending, but nothing leaves this machine
    looking up Lookup (hashes of the prompt) ──▶ LookedUp (lengths that this pool can serve)
               Promised (how what the router was told compares with it)
               Hold (the blocks of one length) ──▶ ReceiveReady | TransferFailed; then as receiving
    receiving  Receive ──▶ (the transfer may have begun before) ReceiveReady (a slot per block) | TransferFailed
               worker copies the slots into engine blocks, compares generations
               Release: the slots are no longer read, or never will be
    resetting  Forget (a model) ──▶ Forgotten

A connection's death ends what its engine reads. What its ranks may be writing to stays until they say that they do not, which
they do for all of it once a scheduler that has attached anew plans a step (SCHEDULER_BACK), or until the engine's last
connection has gone, as when its process dies. A scheduler that attaches anew ends its earlier connection, with what nobody has
read of it yet. "Layer ready" is not a message but a 32-byte entry in a ring in shared memory, announced by an eventfd (see
ring.py).
"""

from __future__ import annotations

import types
import typing
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

import msgpack

from prfaas.errors import RemoteProtocolError
from prfaas.types import BlockHash, FailureReason, GroupBlocks, TransferId

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 16 << 20  # 1M tokens in units of 16 are 1 MiB of hashes a group
LENGTH_BYTES = 4
HELD = -1  # in a slot list: the agent holds this block already, do not copy it

AttachRole = Literal["scheduler", "worker"]


_OPTIONAL = {"optional": True}


def _optional(value: Any) -> Any:
    """The default of a field that is left out of the message while it and all after it have theirs: older peers do not know
    it."""
    return field(default=value, metadata=_OPTIONAL)


@dataclass(frozen=True)
class Attach:
    """The first message of every connection. `layout` is `Layout.to_dict()` from a worker, None from a scheduler.

    `pins_arena` says that a device will reach the arena by physical address, so that its pages must stay where they are.
    """

    version: int
    instance: str
    role: AttachRole
    rank: int
    layout: dict[str, Any] | None
    pins_arena: bool = False


@dataclass(frozen=True)
class Attached:
    """The agent's answer; to a worker with three descriptors: arena memfd, ring memfd, ring eventfd."""

    agent: str
    num_slots: int
    slot_bytes: int  # distance between two slots in the arena
    header_bytes: int  # where slot 0 begins; before it the generation table
    epoch: int = 0  # of the agent's start: slots and handles mean nothing to an agent of another one
    session: int = _optional(0)  # how many schedulers of this instance were attached here before this one


@dataclass(frozen=True)
class Refused:
    """The connection is refused and will be closed; `message` names what is wrong."""

    message: str


@dataclass(frozen=True)
class Send:
    """Open a transfer to the agent that the grant names, and grant slots for its blocks."""

    transfer_id: TransferId
    grant: bytes
    groups: tuple[GroupBlocks, ...]
    trace: str = _optional("")  # traceparent of the leg
    priority: int = _optional(0)  # the request's, as vLLM has it: a lower one is more urgent


@dataclass(frozen=True)
class SendOpened:
    """`slots[rank][i][j]` takes block j of `groups[i]`, HELD where nothing need be copied; the ring knows it as `handle`."""

    transfer_id: TransferId
    handle: int
    slots: list[list[list[int]]]


@dataclass(frozen=True)
class Receive:
    """Ask for the blocks of a granted transfer; the engine's own `prompt_hash` must be the granted one.

    Without groups: the engine will not load it, and it is given up.
    """

    transfer_id: TransferId
    grant: bytes
    prompt_hash: BlockHash
    groups: tuple[GroupBlocks, ...]
    trace: str = _optional("")  # traceparent of the leg


@dataclass(frozen=True)
class ReceiveReady:
    """Everything is in host memory: `slots[rank][i][j]` holds block j of `groups[i]` at `generations[rank][i][j]`."""

    transfer_id: TransferId
    slots: list[list[list[int]]]
    generations: list[list[list[int]]]


@dataclass(frozen=True)
class Store:
    """Keep these computed blocks for later requests; the engine fills the slots of `SendOpened` as for a transfer."""

    transfer_id: TransferId
    num_tokens: int
    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True)
class Lookup:
    """How much of a prompt does this node's pool hold? `root` and `units` are its chain, 16 bytes each, joined."""

    transfer_id: TransferId
    root: BlockHash
    units: bytes
    limit_tokens: int
    promised_tokens: int = _optional(0)  # what a decision counted on


@dataclass(frozen=True)
class LookedUp:
    """Lengths that all KV groups can serve, longest first, each with the hash that the prompt must have at that length.

    A length that is no multiple of 16 is a candidate: the engine, which has the tokens, compares the hash.
    """

    transfer_id: TransferId
    lengths: list[list[Any]]  # [num_tokens, hash]
    # where they fall short of what was promised: [kind of KV group, what groups of that kind could serve by themselves]
    held_tokens: list[list[Any]] | None = field(default=None, metadata=_OPTIONAL)


@dataclass(frozen=True)
class Promised:
    """How a decision's promise of cached tokens turned out: what the engine could take up of them."""

    predicted_tokens: int
    found_tokens: int
    held_tokens: list[list[Any]] | None = field(
        default=None, metadata=_OPTIONAL
    )  # as in LookedUp, of a promise that was broken


@dataclass(frozen=True)
class Hold:
    """Pin the blocks of one length; they are all here, or the answer is TransferFailed."""

    transfer_id: TransferId
    num_tokens: int
    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True)
class Release:
    """The reader has ended; the slots of this transfer need not be kept for it, nor what has not come yet be waited for."""

    transfer_id: TransferId


@dataclass(frozen=True)
class Cancel:
    """The request has ended and no worker copies anything for it; a transfer that is not whole is given up."""

    transfer_id: TransferId


@dataclass(frozen=True)
class Forget:
    """Nobody is to find what was computed for a model before: its weights may be others from here on."""

    transfer_id: TransferId  # names the answer
    model: str


@dataclass(frozen=True)
class Forgotten:
    """It is done: in memory, on the SSD, and of what is still being filled."""

    transfer_id: TransferId


@dataclass(frozen=True)
class TransferDone:
    """Every byte was acknowledged by the receiver; the sending side's slots are free again."""

    transfer_id: TransferId


@dataclass(frozen=True)
class TransferFailed:
    """The transfer ended without its data. The receiving engine computes the prompt itself."""

    transfer_id: TransferId
    reason: FailureReason
    message: str


Message = (
    Attach
    | Attached
    | Refused
    | Send
    | SendOpened
    | Receive
    | ReceiveReady
    | Store
    | Lookup
    | LookedUp
    | Promised
    | Hold
    | Release
    | Cancel
    | Forget
    | Forgotten
    | TransferDone
    | TransferFailed
)
_BY_NAME: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}
_HINTS = {kind: typing.get_type_hints(kind) for kind in _BY_NAME.values()}


def encode(message: Message) -> bytes:
    """The message as it stands on the socket, length included."""
    said = list(fields(message))
    while said and _is_left_out(message, said[-1]):
        said.pop()
    body: bytes = msgpack.packb([type(message).__name__, *(_plain(getattr(message, its.name)) for its in said)])
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def _is_left_out(message: Message, its: Field[Any]) -> bool:
    return "optional" in its.metadata and getattr(message, its.name) == its.default


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], GroupBlocks):
        return pack_groups(value)
    return value


def decode(body: bytes) -> Message:
    """The message inside one frame.

    Raises:
        RemoteProtocolError: it is not msgpack, its name is unknown, or a field is of the wrong type.
    """
    try:
        name, *values = msgpack.unpackb(body)
        kind = _BY_NAME[name]
        hints = _HINTS[kind]
        values += [its.default for its in fields(kind)[len(values) :] if "optional" in its.metadata]
        typed = [_typed(hints[its.name], value) for its, value in zip(fields(kind), values, strict=True)]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(
            "malformed", f"not a message of protocol version {PROTOCOL_VERSION}: {error!r}"
        ) from error
    message: Message = kind(*typed)
    return message


def _typed(hint: Any, value: Any) -> Any:
    """`value` as `hint`, or a TypeError; nested lists are checked where they are used."""
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
    """Block lists as msgpack takes them; the wire's `open` carries the same form."""
    return [[group.group, group.first_block, b"".join(group.hashes), group.parent] for group in groups]


def unpack_groups(packed: Any) -> tuple[GroupBlocks, ...]:
    """The inverse of `pack_groups`.

    Raises:
        TypeError: it has another form.
    """
    return tuple(_group_blocks(*item) for item in packed)


def _group_blocks(group: int, first_block: int, joined: bytes, parent: bytes) -> GroupBlocks:
    numbers = isinstance(group, int) and isinstance(first_block, int) and group >= 0 and first_block >= 0
    if (
        not (numbers and isinstance(joined, bytes) and isinstance(parent, bytes))
        or len(joined) % 16
        or len(parent) != 16
    ):
        raise TypeError("a block list is [group, first block, 16-byte hashes, hash of the block before]")
    hashes = tuple(BlockHash(joined[start : start + 16]) for start in range(0, len(joined), 16))
    return GroupBlocks(group=group, first_block=first_block, hashes=hashes, parent=BlockHash(parent))


class MessageBuffer:
    """Bytes in, messages out, for one side of one connection."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes.

        Raises:
            RemoteProtocolError: a message is malformed or longer than MAX_MESSAGE_BYTES.
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
