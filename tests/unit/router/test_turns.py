"""What is known of earlier turns, and when their tokens may be added to."""

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
    extend_turn,
    record_comparison,
)


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


def tokens_of(messages: Any) -> list[int]:
    """Return an additive template over bytes."""
    return list(
        ("".join(f"<{message['role']}>{message['content']}</>" for message in messages) + "<assistant>").encode()
    )


def of(turns: ConversationCache, *texts: str, **shape: Any) -> Conversation:
    conversation = turns.conversation({"model": "m", "messages": said(*texts), **shape})
    assert conversation is not None
    return conversation


def form_of(base: list[int]) -> PromptForm:
    form = PromptForm()
    form.learn_base(base)
    return form


LONG = "a long question " * 20


def test_the_longest_known_turn_is_found_with_what_was_said_since() -> None:
    turns = ConversationCache()
    turns.remember(of(turns, LONG), [1, 2])
    turns.remember(of(turns, LONG, "b", "c"), [1, 2, 3])
    found = turns.earlier(of(turns, LONG, "b", "c", "d", "e"))
    assert found is not None and list(found.token_ids) == [1, 2, 3]
    assert [message["content"] for message in found.new_messages] == ["d", "e"]


@pytest.mark.parametrize(
    "other",
    [
        {"messages": said(LONG + ".", "b", "c")},
        {"messages": said(LONG, "b", "c"), "model": "another"},
        {"messages": said(LONG, "b", "c"), "tools": [{"type": "function"}]},
        {"messages": said(LONG, "b", "c"), "chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_another_conversation_or_another_form_is_not_found(other: dict[str, Any]) -> None:
    turns = ConversationCache()
    turns.remember(of(turns, LONG), [1, 2])
    conversation = turns.conversation({"model": "m"} | other)
    assert conversation is not None and turns.earlier(conversation) is None


def test_sampling_is_not_part_of_the_form() -> None:
    turns = ConversationCache()
    turns.remember(of(turns, LONG, temperature=0, stream=True), [1, 2])
    assert turns.earlier(of(turns, LONG, "b", "c", temperature=1, max_tokens=5)) is not None


def test_clients_share_what_is_known_of_a_form_and_no_conversation() -> None:
    turns = ConversationCache()
    turns.remember(of(turns, LONG, cache_salt="alice"), [1, 2])
    bobs = of(turns, LONG, "b", "c", cache_salt="bob")
    assert turns.earlier(bobs) is None and turns.earlier(of(turns, LONG, "b", "c", cache_salt="alice")) is not None
    assert bobs.form is of(turns, LONG, cache_salt="alice").form


def test_a_turn_that_adds_more_than_there_was_is_tokenised_whole() -> None:
    turns = ConversationCache()
    turns.remember(of(turns, "a"), [1])
    assert turns.earlier(of(turns, "a", "b", LONG)) is None


@pytest.mark.parametrize("shape", [{"continue_final_message": True}, {"add_generation_prompt": False}])
def test_a_prompt_that_does_not_open_an_answer_is_no_turn(shape: dict[str, Any]) -> None:
    assert ConversationCache().conversation({"model": "m", "messages": said("a"), **shape}) is None


@given(st.lists(st.text(max_size=20), min_size=3, max_size=7).filter(lambda texts: len(texts) % 2 == 1))
def test_the_tokens_added_to_an_earlier_turn_are_those_of_the_whole(texts: list[str]) -> None:
    messages = said(*texts)
    form = form_of(tokens_of(STAND_IN))
    guess = extend_turn(form, EarlierTurn(tokens_of(messages[:1]), messages[1:]), tokens_of([*STAND_IN, *messages[1:]]))
    assert guess == tokens_of(messages)


def test_a_stand_in_that_does_not_begin_with_its_base_adds_nothing() -> None:
    assert extend_turn(form_of([9, 9]), EarlierTurn([1], said("b")), [1, 2, 3]) is None
    assert extend_turn(PromptForm(), EarlierTurn([1], said("b")), [1, 2, 3]) is None


@pytest.mark.parametrize("base", [None, [0] * (MAX_BASE_TOKENS + 1)])
def test_a_form_whose_stand_in_is_unknown_or_long_is_tokenised_whole(base: list[int] | None) -> None:
    form = PromptForm()
    form.learn_base(base)
    assert not form.additive and form.base is None


def test_one_difference_ends_the_belief_in_a_form() -> None:
    turns = ConversationCache()
    turns.remember(of(turns, LONG), [1, 2])
    later = of(turns, LONG, "b", "c")
    record_comparison(later.form, [1], [1])
    assert turns.earlier(later) is not None
    record_comparison(later.form, [1], [2])
    assert turns.earlier(later) is None


def test_the_least_recently_asked_for_leaves_when_there_is_no_room() -> None:
    turns = ConversationCache(max_tokens=5)
    first, second, third = (of(turns, LONG + name) for name in "abc")
    turns.remember(first, [1, 2])
    turns.remember(second, [3, 4])
    assert turns.earlier(of(turns, LONG + "a", "x", "y")) is not None
    turns.remember(third, [5, 6])
    assert turns.earlier(of(turns, LONG + "b", "x", "y")) is None
    assert turns.earlier(of(turns, LONG + "a", "x", "y")) is not None
    turns.remember(second, [0] * 6)  # more than there is room for
    assert turns.earlier(of(turns, LONG + "b", "x", "y")) is None
