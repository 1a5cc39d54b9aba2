"""vLLM's KV cache events, decoded: batches of stored, removed and cleared blocks.

A batch is a msgpack array (time, events, data-parallel rank). An event is a map with its class name under "type".
Unknown fields and events are ignored.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from prfaas.errors import RemoteProtocolError
from prfaas.units import split_address

EngineHash = int | bytes  # vLLM's own hash of at least 64 bits: opaque, and equal in every KV group.
_GPU = "GPU"


@dataclass(frozen=True)
class EngineStored:
    """Blocks of one chain after `parent`. With fewer hashes than blocks the event does not state which blocks they name."""

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    token_ids: tuple[int, ...]
    block_tokens: int
    group: int | None
    has_extras: bool  # The hash also covers an adapter, media or prompt embeddings.
    salt: str = ""  # Salt of a chain's first block.


@dataclass(frozen=True)
class EngineRemoved:
    """Blocks that the engine removed."""

    hashes: tuple[EngineHash, ...]
    group: int | None


@dataclass(frozen=True)
class EngineCleared:
    """The engine removed every block."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


def check_endpoint(endpoint: str) -> None:
    """Raise ValueError if a ZeroMQ socket cannot connect to this endpoint."""
    scheme, _, place = endpoint.partition("://")
    if not (scheme == "ipc" and place) and not (scheme == "tcp" and _is_host(place)):
        raise ValueError(f"{endpoint!r}; write tcp://host:port or ipc://path, as a client connects to it")


def _is_host(place: str) -> bool:
    try:
        return split_address(place)[0] != "*"
    except ValueError:
        return False


def decode_batch(payload: bytes) -> list[EngineEvent]:
    """Return the events of a batch that concern the engine's device memory, in order.

    Raises:
        RemoteProtocolError: the batch does not have vLLM's form.
    """
    try:
        batch = msgpack.unpackb(payload, strict_map_key=False)
        found = [_event(event["type"], event) for event in batch[1]]
    except (msgpack.UnpackException, ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        raise RemoteProtocolError("malformed", f"a batch of KV events cannot be read: {error!r}") from error
    return [event for event in found if event is not None]


def _event(name: str, fields: dict[str, Any]) -> EngineEvent | None:
    if name == "AllBlocksCleared":
        return EngineCleared()
    if name not in ("BlockStored", "BlockRemoved") or str(fields.get("medium") or _GPU).upper() != _GPU:
        return None
    hashes, group = tuple(fields["block_hashes"]), fields.get("group_idx")
    if not all(isinstance(block_hash, int | bytes) for block_hash in hashes):
        raise ValueError("a block hash is a number or bytes")
    if not isinstance(group, int | None):
        raise ValueError("a group is a number")
    if name == "BlockRemoved":
        return EngineRemoved(hashes, group)
    if not isinstance(fields["parent_block_hash"], int | bytes | None):
        raise ValueError("a parent is a number or bytes")
    salt, extra_keys = _salt(fields)
    extras = [fields.get("lora_id"), fields.get("lora_name"), *extra_keys]
    return EngineStored(
        hashes,
        fields["parent_block_hash"],
        tuple(array("I", fields["token_ids"])),
        int(fields["block_size"]),
        group,
        any(extra is not None for extra in extras),
        salt,
    )


def _salt(fields: dict[str, Any]) -> tuple[str, Sequence[Any]]:
    """Return the salt of an event that begins a chain, and its other extra keys."""
    extra_keys: Sequence[Any] = fields.get("extra_keys") or ()
    if fields["parent_block_hash"] is not None or fields.get("lora_name") is not None or not extra_keys:
        return "", extra_keys
    match extra_keys[0]:
        case [str(salt)]:
            return salt, extra_keys[1:]
        case _:
            return "", extra_keys
