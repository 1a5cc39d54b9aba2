"""What the router must know of an OpenAI request, and the bodies it sends in its place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

Endpoint = Literal["completions", "chat"]
GRANT_PARAM = "prfaas_grant"
REFUSED_FIELDS = ("kv_transfer_params", "cache_salt")  # they name other people's KV; only the router writes them
# Fields by which /tokenize renders a chat just as /v1/chat/completions does.
_RENDER_FIELDS = (
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
# What the prefill leg needs to run the same adapter and nothing else.
_PREFILL_FIELDS = ("model", "priority")


class BadRequest(Exception):
    """The client's request cannot be served; the text is for the client."""


@dataclass(frozen=True)
class ParsedRequest:
    """A request body, parsed once."""

    endpoint: Endpoint
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def model(self) -> str | None:
        model = self.body.get("model")
        return model if isinstance(model, str) else None

    @property
    def token_ids(self) -> list[int] | None:
        """The prompt, when the client gave it as token ids."""
        prompt = self.body.get("prompt")
        if self.endpoint == "completions" and isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return prompt
        return None

    def max_prompt_tokens(self) -> int:
        """An upper bound of the prompt's length that costs no tokenising: a token stands for at least one byte."""
        if self.token_ids is not None:
            return len(self.token_ids)
        if self.endpoint == "completions":
            prompt = self.body.get("prompt")
            return len(prompt.encode()) if isinstance(prompt, str) else 0
        return len(json.dumps([self.body.get(name) for name in _RENDER_FIELDS[:2]], ensure_ascii=False).encode())

    def transferable(self) -> bool:
        """Whether its KV is that of one list of text tokens that one answer continues."""
        body = self.body
        if (body.get("n") or 1) != 1 or (body.get("best_of") or 1) != 1 or body.get("use_beam_search"):
            return False
        if body.get("prompt_logprobs") is not None or body.get("echo") or body.get("prompt_embeds"):
            return False
        if self.endpoint == "completions":
            return isinstance(body.get("prompt"), str) or self.token_ids is not None
        return all(_is_text(message) for message in body.get("messages") or [None])

    def tokenize_body(self) -> dict[str, Any]:
        """What `/tokenize` is asked."""
        if self.endpoint == "completions":
            fields: tuple[str, ...] = ("model", "prompt", "add_special_tokens")
        else:
            fields = ("model", "add_special_tokens", *_RENDER_FIELDS)
        return {name: self.body[name] for name in fields if name in self.body}

    def prefill_body(self, token_ids: list[int], grant: str) -> dict[str, Any]:
        """The prefill leg: a completion of all tokens but the last, of which one token is computed and ignored."""
        kept = {name: self.body[name] for name in _PREFILL_FIELDS if name in self.body}
        params = {"do_remote_decode": True, GRANT_PARAM: grant}
        return kept | {"prompt": token_ids[:-1], "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}

    def decode_body(self, token_ids: list[int], grant: str) -> dict[str, Any]:
        """The decode leg: the client's request over the very token ids that the prefill leg computes."""
        params: dict[str, Any] = {"do_remote_prefill": True, GRANT_PARAM: grant}
        if self.endpoint == "completions":
            return self.body | {"prompt": token_ids, "kv_transfer_params": params}
        return self.body | {"kv_transfer_params": params | {"prompt_token_ids": token_ids}}


def parse(endpoint: Endpoint, raw: bytes) -> ParsedRequest:
    """The request in `raw`.

    Raises:
        BadRequest: it is no JSON object, lacks its prompt, or carries a field that only the router may write.
    """
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    needed = "prompt" if endpoint == "completions" else "messages"
    if needed not in body:
        raise BadRequest(f"{needed}: missing")
    for name in REFUSED_FIELDS:
        if body.get(name) is not None:
            raise BadRequest(f"{name}: clients may not set this field")
    return ParsedRequest(endpoint, body)


def error_body(message: str, *, kind: str, code: int) -> bytes:
    """An error as OpenAI clients expect it."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def _is_text(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)
