"""Cache of earlier turns, and the conditions for extending their tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.router.openai.conversation import (
    MAX_BASE_TOKENS,
    STAND_IN,
    Conversation,
    ConversationCache,
    EarlierTurn,
    PromptForm,
)


def messages_of(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


def tokens_of(messages: Any) -> list[int]:
    """Return the tokens of messages under an additive template over bytes."""
    return list(
        ("".join(f"<{message['role']}>{message['content']}</>" for message in messages) + "<assistant>").encode()
    )


def conversation_of(cache: ConversationCache, *texts: str, **shape: Any) -> Conversation:
    conversation = cache.conversation({"model": "m", "messages": messages_of(*texts), **shape})
    assert conversation is not None
    return conversation


def form_of(base: list[int]) -> PromptForm:
    form = PromptForm()
    form.learn_base(base)
    return form


LONG = "a long question " * 20


def test_longest_known_turn_is_found_with_the_messages_since() -> None:
    cache = ConversationCache()
    cache.remember(conversation_of(cache, LONG), [1, 2])
    cache.remember(conversation_of(cache, LONG, "b", "c"), [1, 2, 3])
    found = cache.earlier(conversation_of(cache, LONG, "b", "c", "d", "e"))
    assert found is not None and list(found.token_ids) == [1, 2, 3]
    assert [message["content"] for message in found.new_messages] == ["d", "e"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": messages_of(LONG + ".", "b", "c")},
        {"messages": messages_of(LONG, "b", "c"), "model": "another"},
        {"messages": messages_of(LONG, "b", "c"), "tools": [{"type": "function"}]},
        {"messages": messages_of(LONG, "b", "c"), "chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_turn_of_another_conversation_or_form_is_not_found(body: dict[str, Any]) -> None:
    cache = ConversationCache()
    cache.remember(conversation_of(cache, LONG), [1, 2])
    conversation = cache.conversation({"model": "m"} | body)
    assert conversation is not None and cache.earlier(conversation) is None


def test_sampling_options_are_not_part_of_the_form() -> None:
    cache = ConversationCache()
    cache.remember(conversation_of(cache, LONG, temperature=0, stream=True), [1, 2])
    assert cache.earlier(conversation_of(cache, LONG, "b", "c", temperature=1, max_tokens=5)) is not None


def test_clients_share_forms_but_no_conversations() -> None:
    cache = ConversationCache()
    cache.remember(conversation_of(cache, LONG, cache_salt="alice"), [1, 2])
    bobs = conversation_of(cache, LONG, "b", "c", cache_salt="bob")
    assert (
        cache.earlier(bobs) is None
        and cache.earlier(conversation_of(cache, LONG, "b", "c", cache_salt="alice")) is not None
    )
    assert bobs.form is conversation_of(cache, LONG, cache_salt="alice").form


def test_turn_with_mostly_new_text_is_tokenised_whole() -> None:
    cache = ConversationCache()
    cache.remember(conversation_of(cache, "a"), [1])
    assert cache.earlier(conversation_of(cache, "a", "b", LONG)) is None


@pytest.mark.parametrize("shape", [{"continue_final_message": True}, {"add_generation_prompt": False}])
def test_prompt_that_does_not_open_an_answer_is_no_turn(shape: dict[str, Any]) -> None:
    assert ConversationCache().conversation({"model": "m", "messages": messages_of("a"), **shape}) is None


@given(st.lists(st.text(max_size=20), min_size=3, max_size=7).filter(lambda texts: len(texts) % 2 == 1))
def test_extended_turn_has_the_tokens_of_the_whole(texts: list[str]) -> None:
    messages = messages_of(*texts)
    form = form_of(tokens_of(STAND_IN))
    earlier = EarlierTurn(tokens_of(messages[:1]), messages[1:])
    guess = form.extend(earlier, tokens_of([*STAND_IN, *messages[1:]]))
    assert guess == tokens_of(messages)


def test_stand_in_that_does_not_begin_with_its_base_extends_nothing() -> None:
    assert form_of([9, 9]).extend(EarlierTurn([1], messages_of("b")), [1, 2, 3]) is None
    assert PromptForm().extend(EarlierTurn([1], messages_of("b")), [1, 2, 3]) is None


@pytest.mark.parametrize("base", [None, [0] * (MAX_BASE_TOKENS + 1)])
def test_form_with_an_unknown_or_long_stand_in_is_tokenised_whole(base: list[int] | None) -> None:
    form = PromptForm()
    form.learn_base(base)
    assert not form.additive and form.base is None


def test_form_is_not_additive_after_one_difference() -> None:
    cache = ConversationCache()
    cache.remember(conversation_of(cache, LONG), [1, 2])
    later = conversation_of(cache, LONG, "b", "c")
    later.form.compare([1], [1])
    assert cache.earlier(later) is not None
    later.form.compare([1], [2])
    assert cache.earlier(later) is None


def test_least_recently_used_conversation_leaves_a_full_cache() -> None:
    cache = ConversationCache(max_tokens=5)
    first, second, third = (conversation_of(cache, LONG + name) for name in "abc")
    cache.remember(first, [1, 2])
    cache.remember(second, [3, 4])
    assert cache.earlier(conversation_of(cache, LONG + "a", "x", "y")) is not None
    cache.remember(third, [5, 6])
    assert cache.earlier(conversation_of(cache, LONG + "b", "x", "y")) is None
    assert cache.earlier(conversation_of(cache, LONG + "a", "x", "y")) is not None
    cache.remember(second, [0] * 6)  # More tokens than the cache may hold.
    assert cache.earlier(conversation_of(cache, LONG + "b", "x", "y")) is None
