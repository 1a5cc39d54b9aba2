"""Bodies of OPEN frames, opaque to the transport: transfers and prefix copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from prfaas.agent.engine.protocol import pack_groups, unpack_groups
from prfaas.grants import MAX_GRANT_BYTES, GrantKind
from prfaas.hashing import HASH_BYTES
from prfaas.kv.layout import FINGERPRINT_BYTES, MAX_LAYERS, Layout
from prfaas.transport.protocol.messages import MAX_BODY_BYTES, Fields, fields_of
from prfaas.types import BlockHash, GroupBlocks

_GRANT_KINDS: dict[str, GrantKind] = {"open": "transfer", "copy": "copy"}
MAX_KIND_BYTES = 16
# Length of a body up to the end of its grant, at most.
MAX_START_BYTES = 32 + MAX_GRANT_BYTES
MAX_RANKS = 4096
# One rank's layout of 1300 layers. Unpacking it may take 20 MiB and 15 ms.
MAX_LAYOUT_BYTES = 256 << 10
# All ranks' layouts together: 5000 layers.
MAX_LAYOUTS_BYTES = 1 << 20
MAX_TRACE_BYTES = 255


@dataclass(frozen=True)
class CopiedPrefix:
    """Prefix of a copy. Its blocks follow from these hashes and the grant.

    `units` are as in `Prefix`. `root` is the parent of the first block, NO_HASH if the sender does not know it.
    """

    units: bytes
    root: BlockHash


@dataclass(frozen=True)
class OpenBody:
    """Description of a transfer by its sender.

    `layouts` may be empty if the peer knows them. `copied` replaces `groups` for a prefix copy, which no engine
    claims. `trace` is the sender's traceparent; without one the field is left out, so that older agents can read the rest.
    """

    grant: bytes
    fingerprints: tuple[bytes, ...]
    layouts: tuple[Layout, ...]
    groups: tuple[GroupBlocks, ...] = ()
    copied: CopiedPrefix | None = None
    trace: str = ""

    @property
    def is_copy(self) -> bool:
        """True for a prefix copy."""
        return self.copied is not None

    def encode(self) -> bytes:
        """Return the body."""
        layouts = [layout.to_dict() for layout in self.layouts]
        kind = "copy" if self.is_copy else "open"
        blocks = pack_groups(self.groups) if self.copied is None else [self.copied.units, self.copied.root]
        parts = [kind, self.grant, list(self.fingerprints), layouts, blocks]
        body: bytes = msgpack.packb([*parts, self.trace] if self.trace else parts)
        return body

    @staticmethod
    def decode(
        body: bytes, *, wants_layouts: Callable[[tuple[bytes, ...], int], bool] = lambda fingerprints, num_bytes: True
    ) -> OpenBody:
        """Return the description in a body.

        `wants_layouts` gets the fingerprints and the size of the packed layouts, and decides whether to read them.

        Raises:
            RemoteProtocolError: The body has another form.
            LayoutError: A layout is malformed.
        """
        with fields_of(body, reason="open_body", what="not an open of this version") as fields:
            has_trace = fields.array(5, 6) == 6
            kind, grant = _grant_kind(fields), fields.octets(MAX_GRANT_BYTES)
            fingerprints = tuple(fields.octets(FINGERPRINT_BYTES) for _ in fields.items(MAX_RANKS))
            packed = fields.packed(max_bytes=MAX_LAYOUTS_BYTES)
            layouts = _read_layouts(packed) if wants_layouts(fingerprints, len(packed)) else ()
            groups = unpack_groups([_group(fields) for _ in fields.items(MAX_LAYERS)]) if kind == "transfer" else ()
            copied = _copied(fields) if kind == "copy" else None
            trace = fields.text(MAX_TRACE_BYTES) if has_trace else ""
            if not fingerprints:
                raise ValueError("an open has at least one fingerprint")
            return OpenBody(grant, fingerprints, layouts, groups, copied, trace)


def read_grant(body: bytes) -> tuple[bytes, GrantKind]:
    """Return the grant of a transfer or copy and its required kind, without reading further.

    Raises:
        RemoteProtocolError: The body has another form.
    """
    start = memoryview(body)[:MAX_START_BYTES]
    with fields_of(start, reason="open_body", what="not an open of this version", is_beginning=True) as fields:
        fields.array(5, 6)
        kind = _grant_kind(fields)
        return fields.octets(MAX_GRANT_BYTES), kind


def _grant_kind(fields: Fields) -> GrantKind:
    kind = fields.text(MAX_KIND_BYTES)
    if kind not in _GRANT_KINDS:
        raise ValueError(f"{kind!r} is not an open")
    return _GRANT_KINDS[kind]


def _read_layouts(packed: memoryview) -> tuple[Layout, ...]:
    with fields_of(packed, reason="open_body", what="not layouts of this version") as fields:
        # Unpacking takes up to eighty times the bytes.
        return tuple(Layout.from_dict(fields.any(dict, max_bytes=MAX_LAYOUT_BYTES)) for _ in fields.items(MAX_RANKS))


def _group(fields: Fields) -> list[object]:
    fields.array(4)
    return [fields.integer(), fields.integer(), fields.octets(MAX_BODY_BYTES), fields.octets(HASH_BYTES)]


def _copied(fields: Fields) -> CopiedPrefix:
    fields.array(2)
    return CopiedPrefix(fields.octets(MAX_BODY_BYTES), BlockHash(fields.exactly(HASH_BYTES)))
