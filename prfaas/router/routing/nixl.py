"""The bodies of NIXL's hand-over (vLLM's NixlConnector, llm-d's nixlv2): prefill says where its KV is, decode fetches it."""

from __future__ import annotations

import json
from typing import Any

from prfaas.router.openai.request import spliced

RESPONSES_PATH = "/v1/responses"
_NOTHING_YET = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


def prefill_body(path: str, body: dict[str, Any]) -> bytes:
    """Return the client's request for one token, not streamed, whose KV is kept for another engine."""
    fields = {name: value for name, value in body.items() if name != "stream_options"}
    limit = "max_output_tokens" if path == RESPONSES_PATH else "max_tokens"
    limits = {name: 1 for name in ("max_completion_tokens", "min_tokens") if name in body}
    keeps = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(_NOTHING_YET)
    return json.dumps(fields | limits | {limit: 1, "stream": False, "kv_transfer_params": keeps}).encode()


def decode_body(raw: bytes, kept: dict[str, Any]) -> bytes:
    """Return the client's own request, with what the prefill engine said of the KV that it keeps."""
    return spliced(raw, kept)
