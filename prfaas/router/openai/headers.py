"""HTTP headers that the parts of prfaas and their clients send to each other."""

import hashlib
import re
import secrets

SESSION_HEADER = "x-session-id"  # Names a session, so that its later turns go to the node with its KV.
PREFILL_HEADER = "x-prefiller-host-port"  # Header of llm-d for the prefill engine that the sidecar uses.
GRANT_HEADER = "x-prfaas-grant"
MAX_SESSION_CHARS = 128
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_of(header: str | None) -> str:
    """Return the client's request id if engines and logs can carry it, otherwise a new one."""
    return header if header and _REQUEST_ID.fullmatch(header) else secrets.token_hex(16)


def session_of(header: str | None) -> str:
    """Return a session's name, or its digest if it is long or not plain text; empty for none."""
    if not header or (len(header) <= MAX_SESSION_CHARS and header.isascii() and header.isprintable()):
        return header or ""
    return hashlib.blake2b(header_bytes(header), digest_size=16).hexdigest()


def header_bytes(header: str) -> bytes:
    """Return a header as it was on the wire, whatever bytes it had."""
    return header.encode("utf-8", "surrogateescape")
