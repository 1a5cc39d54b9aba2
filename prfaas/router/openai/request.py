"""OpenAI requests: their properties that matter for routing, and the bodies that the engines get."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from prfaas.scheduler.snapshot import Obstacle

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
ENDPOINTS = {path: endpoint for endpoint, path in PATHS.items()}
RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"
MAX_BODY_BYTES = 32 << 20
GRANT_PARAM = "prfaas_grant"
PROMISED_PARAM = "prfaas_promised_tokens"
TRACE_PARAM = "prfaas_trace"
PARAMS_FIELD, SALT_FIELD = "kv_transfer_params", "cache_salt"
EXTRA_FIELD = "vllm_xargs"  # Connectors also find the fields of PARAMS_FIELD here.
REFUSED_FIELDS = (PARAMS_FIELD, SALT_FIELD)  # Only the router writes them, because they name the KV of others.
# Fields with the same meaning in /tokenize and in the request.
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
_PREFILL_FIELDS = ("model", "priority", SALT_FIELD)  # Fields of the client's request in the prefill leg.
_NIXL_FIELDS = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
BYTES_PER_TOKEN = 4  # Approximate for English text.
MAX_TOKEN_BYTES = 128  # Longest token of common vocabularies, a run of blanks.
MAX_TOKEN_ID = (1 << 31) - 1
MAX_OUTPUT_TOKENS = (1 << 32) - 1


class BadRequest(Exception):
    """Request that cannot be served. The text is for the client."""


@dataclass(frozen=True)
class ParsedRequest:
    """Completion or chat, parsed once."""

    endpoint: Endpoint
    body: dict[str, Any]
    raw: bytes

    @property
    def model(self) -> str | None:
        return _model_of(self.body)

    @property
    def tenant(self) -> str:
        """Return the salt of the request's hashes; empty for none."""
        return str(self.body.get(SALT_FIELD) or "")

    @cached_property
    def token_ids(self) -> list[int] | None:
        """Return the prompt if the client gave it as token ids."""
        prompt = self.body.get("prompt")
        if self.endpoint != "completions" or not isinstance(prompt, list) or not prompt:
            return None
        return prompt if set(map(type, prompt)) == {int} and 0 <= min(prompt) <= max(prompt) <= MAX_TOKEN_ID else None

    @property
    def max_prompt_tokens(self) -> int:
        """Return an upper bound of the prompt's length without tokenising: each token encodes at least one byte.

        The bound excludes the tokens that a chat template or the tokenizer adds.
        """
        return len(self.token_ids) if self.token_ids is not None else len(self.raw)

    @property
    def estimated_prompt_tokens(self) -> int:
        """Return the estimated length of the prompt, to use until an engine has counted it."""
        return len(self.token_ids) if self.token_ids is not None else len(self.raw) // BYTES_PER_TOKEN

    def check_length(self, max_model_len: int) -> None:
        """Check that the prompt could fit, without tokenising it. 0 is no limit.

        Raises:
            BadRequest: it is too long even if all of its tokens are the longest.
        """
        if not max_model_len or self.body.get("truncate_prompt_tokens") is not None:
            return
        if self.endpoint == "chat":
            texts = [text for message in _items(self.body.get("messages")) for text in _texts(message)]
            fewest = sum(map(_num_bytes, texts)) // MAX_TOKEN_BYTES
        else:
            fewest = _fewest_tokens(self.body.get("prompt"))
        if fewest > max_model_len:
            raise BadRequest(f"the prompt has at least {fewest} tokens; the model takes at most {max_model_len}")

    @property
    def max_output_tokens(self) -> int:
        """Return the limit of the answer in tokens; 0 if the client names none."""
        for name in ("max_completion_tokens", "max_tokens"):
            limit = self.body.get(name)
            if type(limit) is int and limit > 0:
                return min(limit, MAX_OUTPUT_TOKENS)
        return 0

    @property
    def turn(self) -> int:
        """Return the turn of a chat: one more than the number of answers in it. 0 for a completion."""
        messages = self.body.get("messages")
        if self.endpoint != "chat" or not isinstance(messages, list):
            return 0
        return 1 + sum(1 for message in messages if isinstance(message, dict) and message.get("role") == "assistant")

    def obstacle(self) -> Obstacle | None:
        """Return the reason why one list of text tokens with one answer does not describe the request; None if it does."""
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

    def tokenize_body(self) -> dict[str, Any] | None:
        """Return the body for `/tokenize`; None if it cannot express everything that shapes the prompt."""
        body = self.body
        if body.get("truncate_prompt_tokens") is not None:
            return None
        fields = {name: body[name] for name in _TOKENIZE_FIELDS[self.endpoint] if body.get(name) is not None}
        if self.endpoint == "chat":
            fields["chat_template_kwargs"] = _template_kwargs(body)
        return fields

    def local_body(self, promised_tokens: int, *, fallback: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        """Return the body for an engine that prefills and decodes, and should have `promised_tokens` cached.

        `fallback` has the parameters that name a transfer that was given up.
        """
        params = dict(fallback) | ({PROMISED_PARAM: promised_tokens} if promised_tokens else {})
        return with_transfer_params(self.raw, params) if params else self.raw

    def prefill_body(self, token_ids: list[int], grant: str, *, promised_tokens: int, trace: str = "") -> bytes:
        """Return the prefill leg: a completion of all tokens but the last. It computes one token, which is ignored."""
        kept = {name: self.body[name] for name in _PREFILL_FIELDS if name in self.body}
        params = _connector_params("do_remote_decode", grant, trace)
        if promised_tokens:
            params[PROMISED_PARAM] = promised_tokens
        sampling = {"max_tokens": 1, "temperature": 0}
        return _with_tokens(kept | sampling | {PARAMS_FIELD: params}, "prompt", token_ids[:-1])

    def decode_body(self, token_ids: list[int], grant: str, *, trace: str = "") -> bytes:
        """Return the decode leg: the client's request with the grant, a completion over the token ids of the prefill leg.

        The engine renders a chat itself, because `/tokenize` might lack tokens that only the engine adds. A difference
        costs a recompute, but never gives a wrong prompt.
        """
        params = _connector_params("do_remote_prefill", grant, trace)
        if self.endpoint == "chat":
            return with_transfer_params(self.raw, params)
        others = {name: value for name, value in self.body.items() if name != "prompt"}
        return _with_tokens(others | {PARAMS_FIELD: params}, "prompt", token_ids)


def parse(endpoint: Endpoint, raw: bytes, *, tenant: str = "") -> ParsedRequest:
    """Return the request in `raw`, with the tenant's salt if there is one.

    Raises:
        BadRequest: it is no JSON object, lacks its prompt, or has a field that only the router may write.
    """
    body = parse_object(raw)
    needed = "prompt" if endpoint == "completions" else "messages"
    if needed not in body and "prompt_embeds" not in body:
        raise BadRequest(f"{needed}: missing")
    if not tenant:
        return ParsedRequest(endpoint, body, raw)
    return ParsedRequest(endpoint, body | {SALT_FIELD: tenant}, _splice(raw, SALT_FIELD, _dumps(tenant)))


def parse_object(raw: bytes, *, refused: Sequence[str] = REFUSED_FIELDS) -> dict[str, Any]:
    """Return the JSON object in `raw`.

    Raises:
        BadRequest: there is none, or it has a field that is `refused`.
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
    """Body of a request that needs no decision, and the model that it names."""

    raw: bytes
    model: str | None = None


def prepare_forwarded(raw: bytes, *, tenant: str = "", refused: Sequence[str] = REFUSED_FIELDS) -> ForwardedBody:
    """Return a body as an engine gets it: a JSON object has the tenant's salt if there is one.

    Raises:
        BadRequest: the JSON, in any encoding that engines accept, has a field that is `refused` or is nested too deeply.
    """
    try:
        body = json.loads(raw)  # Like engines, this accepts a byte-order mark, UTF-16 and UTF-32.
    except ValueError:
        return ForwardedBody(raw)
    except RecursionError as error:
        raise BadRequest(f"the body is nested too deeply: {error}") from error
    if not isinstance(body, dict):
        return ForwardedBody(raw)
    _check_fields(body, refused)
    return ForwardedBody(_dumps(body | {SALT_FIELD: tenant}) if tenant else raw, _model_of(body))


def _model_of(body: dict[str, Any]) -> str | None:
    model = body.get("model")
    return model if isinstance(model, str) else None


def _check_fields(body: dict[str, Any], refused: Sequence[str]) -> None:
    extra = body.get(EXTRA_FIELD)
    for name in refused:
        if body.get(name) is not None:
            raise BadRequest(f"{name}: clients may not set this field")
        if isinstance(extra, dict) and name in extra:
            raise BadRequest(f"{EXTRA_FIELD}.{name}: clients may not set this field")


def error_body(message: str, *, kind: str, code: int) -> bytes:
    """Return an error in OpenAI's form."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def nixl_prefill_body(path: str, body: dict[str, Any]) -> bytes:
    """Return the client's request for one token, not streamed, whose KV is kept for another engine.

    This is the first half of NIXL's hand-over (vLLM's NixlConnector, llm-d's nixlv2).
    """
    fields = {name: value for name, value in body.items() if name != "stream_options"}
    if path == RESPONSES_PATH:
        limits = {"max_output_tokens": 1}
    else:
        limits = {"max_tokens": 1, "min_tokens": 1}
        if "max_completion_tokens" in body:
            limits["max_completion_tokens"] = 1
    params = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(_NIXL_FIELDS)
    return json.dumps(fields | limits | {"stream": False, PARAMS_FIELD: params}).encode()


def with_transfer_params(raw: bytes, params: dict[str, Any]) -> bytes:
    """Return `raw` with kv_transfer_params as its last field, which overrides a null one from the client."""
    return _splice(raw, PARAMS_FIELD, _dumps(params))


def _splice(raw: bytes, name: str, value: bytes) -> bytes:
    return raw.rstrip()[:-1] + f',"{name}":'.encode() + value + b"}"


def _connector_params(direction: str, grant: str, trace: str) -> dict[str, Any]:
    """Return the parameters for an engine's connector. `trace` is the leg's traceparent, left out if empty."""
    return {direction: True, GRANT_PARAM: grant} | ({TRACE_PARAM: trace} if trace else {})


def _with_tokens(fields: dict[str, Any], name: str, token_ids: list[int]) -> bytes:
    """Return a JSON object of some fields and one list of tokens, which makes up most of it."""
    return _dumps(fields)[:-1] + f',"{name}":'.encode() + msgspec.json.encode(token_ids) + b"}"


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template, merged as vLLM's ChatCompletionRequest.build_chat_params does.

    `/tokenize` has no fields of its own for documents and reasoning_effort.
    """
    given = body.get("chat_template_kwargs")
    own = {name: body[name] for name in ("documents", "reasoning_effort") if body.get(name) not in (None, "auto")}
    kwargs = (given if isinstance(given, dict) else {}) | own
    if body.get("reasoning_effort") is not None:
        kwargs.setdefault("enable_thinking", body["reasoning_effort"] != "none")
    return kwargs


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(message: Any) -> list[str]:
    """Return the texts of a chat message."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return [content]
    texts = (part.get("text") for part in _items(content) if isinstance(part, dict))
    return [text for text in texts if isinstance(text, str)]


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _fewest_tokens(prompt: Any) -> int:
    """Return a lower bound of the tokens of a completion's prompt, or of the longest of several."""
    if isinstance(prompt, str):
        return _num_bytes(prompt) // MAX_TOKEN_BYTES
    items = _items(prompt)
    if not items or isinstance(items[0], int):
        return len(items)
    texts = [_num_bytes(item) // MAX_TOKEN_BYTES for item in items if isinstance(item, str)]
    return max([*texts, *(len(item) for item in items if isinstance(item, list))], default=0)


def _is_text(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)
