"""What the router must know of an OpenAI request, and the bodies it sends in its place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from prfaas.scheduler.snapshot import Obstacle

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
GRANT_PARAM = "prfaas_grant"
PROMISED_PARAM = "prfaas_promised_tokens"
TRACE_PARAM = "prfaas_trace"
PARAMS_FIELD, SALT_FIELD = "kv_transfer_params", "cache_salt"
EXTRA_FIELD = "vllm_xargs"  # an engine's connectors find what stands there where they look for PARAMS_FIELD's
REFUSED_FIELDS = (PARAMS_FIELD, SALT_FIELD)  # they name other people's KV; only the router writes them
# Fields that stand alike in /tokenize and in the request itself.
_TOKENIZE_FIELDS: dict[Endpoint, tuple[str, ...]] = {
    "completions": ("model", "prompt", "add_special_tokens"),
    "chat": (
        "model",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
    ),
}
_PREFILL_FIELDS = ("model", "priority", SALT_FIELD)  # what the prefill leg takes over from the client's request
BYTES_PER_TOKEN = 4  # of English text, about
MAX_TOKEN_ID = (1 << 31) - 1
MAX_OUTPUT_TOKENS = (1 << 32) - 1


class BadRequest(Exception):
    """The client's request cannot be served; the text is for the client."""


@dataclass(frozen=True)
class ParsedRequest:
    """A request's bytes, parsed once."""

    endpoint: Endpoint
    body: dict[str, Any]
    raw: bytes

    @property
    def model(self) -> str | None:
        model = self.body.get("model")
        return model if isinstance(model, str) else None

    @property
    def tenant(self) -> str:
        """Whose salt its hashes carry; empty: none."""
        return str(self.body.get(SALT_FIELD) or "")

    @cached_property
    def token_ids(self) -> list[int] | None:
        """Return the prompt, when the client gave it as token ids."""
        prompt = self.body.get("prompt")
        if self.endpoint != "completions" or not isinstance(prompt, list) or not prompt:
            return None
        return prompt if set(map(type, prompt)) == {int} and 0 <= min(prompt) <= max(prompt) <= MAX_TOKEN_ID else None

    @property
    def max_prompt_tokens(self) -> int:
        """Return an upper bound of the prompt's length that costs no tokenising: a token stands for at least one byte of it.

        What a chat template or the tokenizer adds by itself is not in it: such a prompt may be longer by that.
        """
        return len(self.token_ids) if self.token_ids is not None else len(self.raw)

    @property
    def estimated_prompt_tokens(self) -> int:
        """What the prompt is taken for until an engine has counted it."""
        return len(self.token_ids) if self.token_ids is not None else len(self.raw) // BYTES_PER_TOKEN

    @property
    def max_output_tokens(self) -> int:
        """Return the answer's limit in tokens; 0 when the client names none."""
        for name in ("max_completion_tokens", "max_tokens"):
            limit = self.body.get(name)
            if type(limit) is int and limit > 0:
                return min(limit, MAX_OUTPUT_TOKENS)
        return 0

    @property
    def turn(self) -> int:
        """Return which turn of its conversation a chat is: one more than the answers in it. 0 for a completion."""
        messages = self.body.get("messages")
        if self.endpoint != "chat" or not isinstance(messages, list):
            return 0
        return 1 + sum(1 for message in messages if isinstance(message, dict) and message.get("role") == "assistant")

    def obstacle(self) -> Obstacle | None:
        """Why its KV is not that of one list of text tokens which one answer continues; None when it is."""
        body = self.body
        if (body.get("n") or 1) != 1 or (body.get("best_of") or 1) != 1 or body.get("use_beam_search"):
            return "several_answers"
        if body.get("prompt_logprobs") is not None or body.get("echo"):
            return "prompt_output"
        if self.endpoint == "chat":
            messages = body.get("messages")
            return None if isinstance(messages, list) and all(map(_is_text, messages)) else "media"
        if body.get("prompt_embeds"):
            return "media"
        return None if isinstance(body.get("prompt"), str) or self.token_ids is not None else "several_prompts"

    def saying(self, messages: Sequence[Any]) -> ParsedRequest:
        """Return the same chat with other messages."""
        body = {**self.body, "messages": list(messages)}
        return ParsedRequest(self.endpoint, body, _dumps(body))

    def tokenize_body(self) -> dict[str, Any] | None:
        """What `/tokenize` is asked; None where it cannot be told everything that shapes the prompt."""
        body = self.body
        if body.get("truncate_prompt_tokens") is not None:
            return None
        fields = {name: body[name] for name in _TOKENIZE_FIELDS[self.endpoint] if body.get(name) is not None}
        if self.endpoint == "chat":
            fields["chat_template_kwargs"] = _template_kwargs(body)
        return fields

    def local_body(self, promised_tokens: int) -> bytes:
        """For an engine that prefills and decodes; `promised_tokens` of the prompt should be cached there."""
        return with_transfer_params(self.raw, {PROMISED_PARAM: promised_tokens}) if promised_tokens else self.raw

    def prefill_body(self, token_ids: list[int], grant: str, *, promised_tokens: int, trace: str = "") -> bytes:
        """Return the prefill leg: a completion of all tokens but the last, of which one token is computed and ignored."""
        kept = {name: self.body[name] for name in _PREFILL_FIELDS if name in self.body}
        params = _params("do_remote_decode", grant, trace)
        if promised_tokens:
            params[PROMISED_PARAM] = promised_tokens
        sampling = {"max_tokens": 1, "temperature": 0}
        return _with_tokens(kept | sampling | {PARAMS_FIELD: params}, "prompt", token_ids[:-1])

    def decode_body(self, token_ids: list[int], grant: str, *, rendered: bool, trace: str = "") -> bytes:
        """Return the decode leg: the client's request with the grant, over the token ids that the prefill leg computes.

        A chat carries them only when `rendered`: the engine's own rendering of this very request. From `/tokenize` they
        might differ from it by what only the engine adds; then the engine renders by itself, and a difference costs a
        recompute, never a wrong prompt.
        """
        params = _params("do_remote_prefill", grant, trace)
        if self.endpoint == "chat" and rendered:
            return _spliced(self.raw, PARAMS_FIELD, _with_tokens(params, "prompt_token_ids", token_ids))
        if self.endpoint == "chat" or self.token_ids is not None:
            return with_transfer_params(self.raw, params)
        others = {name: value for name, value in self.body.items() if name != "prompt"}
        return _with_tokens(others | {PARAMS_FIELD: params}, "prompt", token_ids)


def parse(endpoint: Endpoint, raw: bytes, *, tenant: str = "") -> ParsedRequest:
    """Return the request in `raw`, salted for its client's tenant, if it has one.

    Raises:
        BadRequest: it is no JSON object, lacks its prompt, or carries a field that only the router may write.
    """
    body = parse_object(raw)
    needed = "prompt" if endpoint == "completions" else "messages"
    if needed not in body and "prompt_embeds" not in body:
        raise BadRequest(f"{needed}: missing")
    if not tenant:
        return ParsedRequest(endpoint, body, raw)
    return ParsedRequest(endpoint, body | {SALT_FIELD: tenant}, _spliced(raw, SALT_FIELD, _dumps(tenant)))


def parse_object(raw: bytes, *, refused: Sequence[str] = REFUSED_FIELDS) -> dict[str, Any]:
    """Return the JSON object in `raw`.

    Raises:
        BadRequest: it is none, or carries a field that is `refused`.
    """
    try:
        body = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON in UTF-8: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    _check_fields(body, refused)
    return body


class ForwardedBody(NamedTuple):
    """A body that needs no decision, as an engine gets it, and the model that it names."""

    raw: bytes
    model: str | None = None


def prepare_forwarded(raw: bytes, *, tenant: str = "", refused: Sequence[str] = REFUSED_FIELDS) -> ForwardedBody:
    """Any body, as an engine gets it: salted where it is a JSON object and the client has a tenant.

    Raises:
        BadRequest: what an engine would take for JSON, in whatever encoding, carries a field that is `refused`, or is too
            deep to be looked at.
    """
    try:
        body = json.loads(raw)  # as engines do: a byte-order mark, UTF-16 and UTF-32 are JSON to them
    except ValueError:
        return ForwardedBody(raw)
    except RecursionError as error:
        raise BadRequest(f"the body is too deep: {error}") from error
    if not isinstance(body, dict):
        return ForwardedBody(raw)
    _check_fields(body, refused)
    model = body.get("model")
    salted = _dumps(body | {SALT_FIELD: tenant}) if tenant else raw
    return ForwardedBody(salted, model if isinstance(model, str) else None)


def _check_fields(body: dict[str, Any], refused: Sequence[str]) -> None:
    extra = body.get(EXTRA_FIELD)
    for name in refused:
        if body.get(name) is not None:
            raise BadRequest(f"{name}: clients may not set this field")
        if isinstance(extra, dict) and name in extra:
            raise BadRequest(f"{EXTRA_FIELD}.{name}: clients may not set this field")


def error_body(message: str, *, kind: str, code: int) -> bytes:
    """Return an error as OpenAI clients expect it."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def with_transfer_params(raw: bytes, params: dict[str, Any]) -> bytes:
    """`raw` with kv_transfer_params as its last field, which counts should the client have sent a null one."""
    return _spliced(raw, PARAMS_FIELD, _dumps(params))


def _spliced(raw: bytes, name: str, value: bytes) -> bytes:
    return raw.rstrip()[:-1] + f',"{name}":'.encode() + value + b"}"


def _params(direction: str, grant: str, trace: str) -> dict[str, Any]:
    """What an engine's connector is told; `trace` is the leg's traceparent, left out when empty."""
    return {direction: True, GRANT_PARAM: grant} | ({TRACE_PARAM: trace} if trace else {})


def _with_tokens(fields: dict[str, Any], name: str, token_ids: list[int]) -> bytes:
    """Return a JSON object of some fields and one list of tokens, which is nearly all of it."""
    return _dumps(fields)[:-1] + f',"{name}":'.encode() + msgspec.json.encode(token_ids) + b"}"


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    """What a chat template is given beside the messages, merged as vLLM's ChatCompletionRequest.build_chat_params does;
    `/tokenize` has no fields of its own for documents and reasoning_effort.
    """
    given = body.get("chat_template_kwargs")
    own = {name: body[name] for name in ("documents", "reasoning_effort") if body.get(name) not in (None, "auto")}
    kwargs = (given if isinstance(given, dict) else {}) | own
    if body.get("reasoning_effort") is not None:
        kwargs.setdefault("enable_thinking", body["reasoning_effort"] != "none")
    return kwargs


def _is_text(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


RESPONSES_PATH = "/v1/responses"
_NOTHING_YET = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


def nixl_prefill_body(path: str, body: dict[str, Any]) -> bytes:
    """Return the client's request for one token, not streamed, whose KV is kept for another engine."""
    fields = {name: value for name, value in body.items() if name != "stream_options"}
    limit = "max_output_tokens" if path == RESPONSES_PATH else "max_tokens"
    limits = {name: 1 for name in ("max_completion_tokens", "min_tokens") if name in body}
    keeps = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(_NOTHING_YET)
    return json.dumps(fields | limits | {limit: 1, "stream": False, "kv_transfer_params": keeps}).encode()


def nixl_decode_body(raw: bytes, kept: dict[str, Any]) -> bytes:
    """Return the client's own request, with what the prefill engine said of the KV that it keeps."""
    return with_transfer_params(raw, kept)
