"""What the router reads of a request and what it sends in its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prfaas.router.openai import BadRequest, Endpoint, ParsedRequest, parse

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
        ("completions", b"[]", "not a JSON object"),
        ("completions", b"{}", "prompt: missing"),
        ("chat", b'{"prompt": "x"}', "messages: missing"),
        ("completions", b'{"prompt": "x", "kv_transfer_params": {}}', "kv_transfer_params"),
        ("chat", b'{"messages": [], "cache_salt": "s"}', "cache_salt"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_its_field(endpoint: Endpoint, raw: bytes, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        parse(endpoint, raw)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"best_of": 3},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"use_beam_search": True},
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2], [3]]},
    ],
)
def test_what_one_list_of_token_ids_does_not_name_stays_local(fields: dict[str, Any]) -> None:
    assert _completion().transferable()
    assert not _completion(**fields).transferable()


def test_a_chat_with_an_image_stays_local_and_one_of_text_parts_does_not() -> None:
    text = {"type": "text", "text": "hello"}
    assert _chat("hello").transferable() and _chat([text]).transferable()
    assert not _chat([text, {"type": "image_url", "image_url": {"url": "data:,"}}]).transferable()


def test_the_bound_of_a_prompt_counts_bytes_of_text_and_given_token_ids() -> None:
    assert _completion(prompt="häuser").max_prompt_tokens() == 7
    assert _completion(prompt=TOKENS).max_prompt_tokens() == 4
    assert _chat("x" * 100).max_prompt_tokens() >= 100


def test_the_prefill_leg_computes_all_tokens_but_the_last_and_nothing_the_client_asked_for() -> None:
    request = _completion(
        prompt=TOKENS, temperature=0.7, stream=True, stop=["x"], max_tokens=99, logprobs=3, priority=2
    )
    assert request.prefill_body(TOKENS, "grant") == {
        "model": "m",
        "priority": 2,
        "prompt": [5, 6, 7],
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"do_remote_decode": True, "prfaas_grant": "grant"},
    }


def test_the_decode_leg_is_the_clients_request_over_the_same_token_ids() -> None:
    completion = _completion(stream=True, stop=["x"]).decode_body(TOKENS, "grant")
    assert completion["prompt"] == TOKENS and completion["stop"] == ["x"] and completion["stream"]
    assert completion["kv_transfer_params"] == {"do_remote_prefill": True, "prfaas_grant": "grant"}
    chat = _chat("hello", tools=[]).decode_body(TOKENS, "grant")
    assert chat["messages"] and chat["kv_transfer_params"]["prompt_token_ids"] == TOKENS


def test_a_chat_is_tokenised_as_it_would_be_rendered() -> None:
    body = _chat("hello", tools=[{"type": "function"}], chat_template_kwargs={"a": 1}, temperature=1).tokenize_body()
    assert set(body) == {"model", "messages", "tools", "chat_template_kwargs"}
