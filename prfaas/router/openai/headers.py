"""The headers that this project's parts and their clients write to each other."""

from __future__ import annotations

import hashlib
import re
import secrets

SESSION_HEADER = "x-session-id"  # names a conversation, so that its later turns go where its KV is
PREFILL_HEADER = "x-prefiller-host-port"  # llm-d's: which engine the sidecar has prefill
GRANT_HEADER = "x-prfaas-grant"
MAX_SESSION_CHARS = 128
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_of(given: str | None) -> str:
    """Return the client's own id, when it is one that engines and logs can carry; otherwise a new one."""
    return given if given and _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def session_of(given: str | None) -> str:
    """Return a conversation's name as given, or its digest when it is long or no plain text; empty: it has none."""
    if not given or (len(given) <= MAX_SESSION_CHARS and given.isascii() and given.isprintable()):
        return given or ""
    return hashlib.blake2b(header_bytes(given), digest_size=16).hexdigest()


def header_bytes(given: str) -> bytes:
    """Return a header as it was on the wire, whatever bytes it had."""
    return given.encode("utf-8", "surrogateescape")
