"""Input of broken or hostile programs: valid messages with parts replaced, cut, repeated or invented."""

import json
import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

WORDS = ("", "a", "west", "west-0", "pd", "prefill", "x" * 3000, "é\u202e\x00", "../../etc/passwd", "-1", "\ud7ff")
NUMBERS = (0, 1, -1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 1e308, float("nan"), 0.5)
PATHS = (
    "/", "/metrics", "/healthz", "/readyz", "/state", "/digests", "/pool", "/hot", "/plan", "/ppd", "/status",
    "/health", "/decisions/00ff", "/decisions/zz", "/debug/decision/%00", "/dashboard/", "/dashboard/figures?seconds=x",
    "/dashboard/../../etc/passwd", "/dashboard/%2e%2e%2fmain.js", "/v1/completions", "/v1/chat/completions", "/v1/models",
    "/v1/%ff%fe", "/tokenize", "/v1//x?y=%", "/drain", "*", "http://127.0.0.1:1/metrics",
)  # fmt: skip
HEADERS = (
    "Host: here", "Host: ", "Content-Type: application/json", "Content-Type: text/\x01", "Content-Type: text/x; charset=zz",
    "Authorization: Bearer \xff",
    "Authorization: Basic", "x-request-id: " + "r" * 400, "x-session-id: \xe9\xff", "traceparent: 00-zz-1-01",
    "traceparent: 00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x-prefiller-host-port: 127.0.0.1:1", "Accept-Encoding: zstd",
    "Content-Encoding: gzip", "Transfer-Encoding: chunked", "Expect: 100-continue", "Upgrade: h2c", "Range: bytes=-1",
    "Connection: close, upgrade", "Cookie: " + "c" * 5000,
)  # fmt: skip


def value(chance: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can write."""
    kind = chance.randrange(6 if depth < 3 else 4)
    if kind == 4:
        return [value(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 5:
        return {chance.choice(WORDS[:6]): value(chance, depth + 1) for _ in range(chance.randrange(4))}
    return (chance.choice(WORDS), chance.choice(NUMBERS), None, chance.random() < 0.5)[kind]


def _body(chance: random.Random) -> bytes:
    honest: dict[str, Any] = {
        "model": "paced",
        "prompt": "x" * 40,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "stream": False,
        "request_id": "r",
    }
    for _ in range(chance.randrange(4)):
        honest[chance.choice([*honest, "kv_transfer_params", "cache_salt", "n", "stream_options"])] = value(chance)
    return changed(chance, json.dumps(honest, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass"))


def changed(chance: random.Random, data: bytes) -> bytes:
    """Three times in four as it is; else cut, repeated, or with other bytes in it."""
    match chance.randrange(12):
        case 0:
            return data[: chance.randrange(len(data) + 1)]
        case 1:
            return data * 2
        case 2:
            noisy = bytearray(data)
            for _ in range(min(len(noisy), 1 + chance.randrange(8))):
                noisy[chance.randrange(len(noisy))] = chance.randrange(256)
            return bytes(noisy)
    return data


def http_request(chance: random.Random) -> bytes:
    """Nearly a request of HTTP/1.1."""
    method = chance.choice(("GET", "POST", "POST", "HEAD", "PUT", "OPTIONS", "PRI", "G\x00T"))
    body = _body(chance) if method in ("POST", "PUT") else b""
    lines = [f"{method} {chance.choice(PATHS)} HTTP/1.{chance.randrange(3)}", "Connection: close"]
    lines += chance.sample(HEADERS, chance.randrange(5))
    if body:
        lines.append(f"Content-Length: {len(body) + chance.choice((0, 0, 0, 0, -1, 5))}")
    return changed(chance, "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)


def http2_frames(chance: random.Random) -> bytes:
    """Return the preface of HTTP/2 and frames whose lengths fit, of any type and content."""
    frames = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])]
    for _ in range(chance.randrange(6)):
        content = chance.randbytes(chance.randrange(200))
        head = len(content).to_bytes(3, "big") + bytes([chance.randrange(11), chance.randrange(256)])
        frames.append(head + chance.randrange(8).to_bytes(4, "big") + content)
    return changed(chance, b"".join(frames))


def length_prefixed(chance: random.Random, honest: Sequence[bytes]) -> bytes:
    """Messages of the agent's socket: honest ones, changed ones, and noise behind lengths that fit."""
    parts = []
    for _ in range(1 + chance.randrange(3)):
        noise = chance.randbytes(chance.randrange(60))
        parts.append(chance.choice([changed(chance, chance.choice(honest)), len(noise).to_bytes(4, "little") + noise]))
    return b"".join(parts)


def message(chance: random.Random, kind: Descriptor, depth: int = 0) -> Message:
    """Return a protobuf message of a kind with anything in its fields."""
    made = GetMessageClass(kind)()
    for field in kind.fields:
        if chance.random() < 0.35 or depth > 4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        for _ in range(chance.randrange(4) if field.is_repeated else 1):
            _set(chance, made, field, depth)
    return made


def _set(chance: random.Random, made: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None:
        inner = message(chance, field.message_type, depth + 1)
        place = getattr(made, field.name)
        (place.add() if field.is_repeated else place).CopyFrom(inner)
        return
    given = _scalar(chance, field)
    if field.is_repeated:
        getattr(made, field.name).append(given)
    else:
        setattr(made, field.name, given)


def _scalar(chance: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return chance.randbytes(chance.choice((0, 1, 16, 16, 32, 160)))
        return chance.choice(WORDS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return float(chance.choice((*NUMBERS, float("inf"))))
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        assert field.enum_type is not None
        return chance.choice(field.enum_type.values).number
    bits = 31 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 62
    return chance.choice((0, 1, 2, 16, 100, 2**bits - 1))
