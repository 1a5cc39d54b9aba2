"""OpenAI requests: their checks, their properties, and the bodies for the engines."""

import contextlib
import json
from typing import Any

import pytest

from prfaas.router.openai.request import BadRequest, Endpoint, ParsedRequest, parse, prepare_forwarded
from prfaas.scheduler.snapshot import Obstacle

TOKENS = [5, 6, 7, 8]


def _completion(**fields: Any) -> ParsedRequest:
    return parse("completions", json.dumps({"model": "m", "prompt": "hello", **fields}).encode())


def _chat(content: Any, **fields: Any) -> ParsedRequest:
    return parse(
        "chat", json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields}).encode()
    )


@pytest.mark.parametrize(
    ("endpoint", "raw", "named"),
    [
        ("completions", b"{", "not JSON"),
        ("completions", '{"prompt": "x"}'.encode("utf-16"), "UTF-8"),
        ("completions", b"[" * 100_000, "not JSON"),
        ("completions", b"[]", "not a JSON object"),
        ("completions", b"{}", "prompt: missing"),
        ("chat", b'{"prompt": "x"}', "messages: missing"),
        ("completions", b'{"prompt": "x", "kv_transfer_params": {}}', "kv_transfer_params"),
        ("completions", b'{"prompt": "x", "kv\\u005ftransfer_params": {}}', "kv_transfer_params"),
        ("chat", b'{"messages": [], "cache_salt": "s"}', "cache_salt"),
        ("completions", b'{"prompt": "x", "vllm_xargs": {"kv_transfer_params": "x"}}', "vllm_xargs.kv_transfer_params"),
    ],
)
def test_invalid_request_is_rejected_with_its_field(endpoint: Endpoint, raw: bytes, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        parse(endpoint, raw)


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({}, None),
        ({"n": 2}, "several_answers"),
        ({"use_beam_search": True}, "several_answers"),
        ({"echo": True}, "prompt_output"),
        ({"prompt_logprobs": 0}, "prompt_output"),
        ({"prompt": ["one", "two"]}, "several_prompts"),
        ({"prompt": [1, -2]}, "several_prompts"),
        ({"prompt": [1, True]}, "several_prompts"),
        ({"prompt": [1, 1 << 40]}, "several_prompts"),
        ({"prompt_embeds": "eA=="}, "media"),
    ],
)
def test_request_beyond_one_list_of_token_ids_has_an_obstacle(
    fields: dict[str, Any], obstacle: Obstacle | None
) -> None:
    assert _completion(**fields).obstacle() == obstacle


def test_chat_with_an_image_has_an_obstacle_and_chat_of_text_parts_has_none() -> None:
    text = {"type": "text", "text": "hello"}
    assert _chat("hello").obstacle() is None and _chat([text]).obstacle() is None
    assert _chat([text, {"type": "image_url", "image_url": {"url": "data:,"}}]).obstacle() == "media"
    assert parse("chat", b'{"messages": "hello"}').obstacle() == "media"


def test_prompt_bound_is_at_least_its_bytes_and_exact_for_token_ids() -> None:
    assert _completion(prompt="häuser\n" * 9).max_prompt_tokens >= len(("häuser\n" * 9).encode())
    assert _completion(prompt=TOKENS).max_prompt_tokens == 4
    assert _chat("x" * 100, tools=[{"y": "z" * 50}]).max_prompt_tokens >= 150


def test_chat_gives_its_turn_and_output_limit() -> None:
    roles = ("system", "user", "assistant", "user")
    chat = parse("chat", json.dumps({"messages": [{"role": role, "content": ""} for role in roles]}).encode())
    assert (chat.turn, _chat("x").turn, _completion().turn) == (2, 1, 0)
    assert _chat("x", max_completion_tokens=7, max_tokens=9).max_output_tokens == 7
    assert _completion(max_tokens="many").max_output_tokens == 0


def test_prefill_leg_computes_all_tokens_but_the_last_without_the_clients_options() -> None:
    request = _completion(
        prompt=TOKENS, temperature=0.7, stream=True, stop=["x"], max_tokens=99, logprobs=3, priority=2
    )
    assert json.loads(request.prefill_body(TOKENS, "grant", promised_tokens=0)) == {
        "model": "m",
        "priority": 2,
        "prompt": [5, 6, 7],
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"do_remote_decode": True, "prfaas_grant": "grant"},
    }


@pytest.mark.parametrize("prompt", ["hello \ud800", TOKENS])
def test_decode_leg_of_a_completion_has_the_clients_options_and_the_same_token_ids(prompt: Any) -> None:
    body = json.loads(_completion(prompt=prompt, stream=True, stop=["x"]).decode_body(TOKENS, "grant"))
    params = {"do_remote_prefill": True, "prfaas_grant": "grant"}
    assert body == {"model": "m", "prompt": TOKENS, "stream": True, "stop": ["x"], "kv_transfer_params": params}


def test_decode_leg_of_a_chat_is_the_clients_bytes_and_the_grant() -> None:
    raw = b'{"messages" :[ ],"kv_transfer_params":null ,"seed":1}\n '
    sent = parse("chat", raw).decode_body(TOKENS, "grant")
    assert sent.startswith(raw.rstrip()[:-1])
    assert json.loads(sent)["kv_transfer_params"] == {"do_remote_prefill": True, "prfaas_grant": "grant"}


def test_chat_is_tokenised_with_the_fields_that_shape_its_rendering() -> None:
    chat = _chat("hello", tools=[{"type": "function"}], chat_template_kwargs={"a": 1}, temperature=1)
    body = chat.tokenize_body()
    assert body is not None and set(body) == {"model", "messages", "tools", "chat_template_kwargs"}


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": 0}},
            {"reasoning_effort": "low", "enable_thinking": 0},
        ),
        ({"documents": [{"text": "d"}]}, {"documents": [{"text": "d"}]}),
    ],
)
def test_chat_template_gets_the_arguments_that_the_engine_would_give_it(
    fields: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    body = _chat("hello", **fields).tokenize_body()
    assert body is not None and body["chat_template_kwargs"] == kwargs


@pytest.mark.parametrize(
    ("endpoint", "body", "fits"),
    [
        ("completions", {"prompt": "x" * 128 * 101}, False),
        ("completions", {"prompt": "é" * 64 * 101}, False),
        ("completions", {"prompt": ["x", "x" * 128 * 101]}, False),
        ("completions", {"prompt": list(range(101))}, False),
        ("completions", {"prompt": [[1], list(range(101))]}, False),
        ("completions", {"prompt": "x" * 128 * 101, "truncate_prompt_tokens": 5}, True),
        ("chat", {"messages": [{"role": "user", "content": "x" * 128 * 51}] * 2}, False),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 128 * 101}]}]}, False),
        ("chat", {"messages": [{"role": "user", "content": [{"image_url": "x" * 128 * 101}]}]}, True),
    ],
)
def test_prompt_that_cannot_fit_the_model_is_refused(endpoint: Any, body: dict[str, Any], fits: bool) -> None:
    request = parse(endpoint, json.dumps(body).encode())
    with contextlib.nullcontext() if fits else pytest.raises(BadRequest, match="at most 100"):
        request.check_length(100)
    request.check_length(0)


@pytest.mark.parametrize("sent", [b'{"prompt": "x" }\n', b'{"prompt": [1, 2, 3], "cache_salt": null}'])
def test_every_body_for_an_engine_has_the_tenants_salt(sent: bytes) -> None:
    request = parse("completions", sent, tenant="acme")
    bodies = [
        request.raw,
        request.local_body(16),
        request.prefill_body(TOKENS, "grant", promised_tokens=0),
        request.decode_body(TOKENS, "grant"),
    ]
    assert [json.loads(body)["cache_salt"] for body in bodies] == ["acme"] * 4
    assert (request.tenant, parse("completions", sent).tenant) == ("acme", "")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_forwarded_body_is_salted_in_any_encoding(encoding: str) -> None:
    assert json.loads(prepare_forwarded('{"input": "é"}'.encode(encoding), tenant="acme").raw) == {
        "input": "é",
        "cache_salt": "acme",
    }
    for salted in (
        '{"cache_salt": "s"}',
        '{"kv_transfer_params": {}}',
        '{"vllm_xargs": {"kv_transfer_params": ["x"]}}',
    ):
        with pytest.raises(BadRequest):
            prepare_forwarded(salted.encode(encoding), tenant="acme")


@pytest.mark.parametrize("sent", [b"", b"--form", b"[1]", b'"text"'])
def test_forwarded_body_that_is_no_json_object_is_unchanged(sent: bytes) -> None:
    assert prepare_forwarded(sent, tenant="acme") == (sent, None)


@pytest.mark.parametrize(("sent", "model"), [('{"model": "m"}', "m"), ("{}", None), ('{"model": ["m"]}', None)])
def test_forwarded_body_gives_its_model(sent: str, model: str | None) -> None:
    assert prepare_forwarded(sent.encode()) == (sent.encode(), model)
