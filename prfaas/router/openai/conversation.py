"""Later turns of a conversation as token ids, of which only what is new is tokenised.

Most chat templates are additive: what they make of a conversation begins with what they made of it a turn earlier. Then
the new tokens are those of a short stand-in, one question of one word and what has been said since, without the tokens
of that question alone. Whether an engine's template is additive is found out by comparing with the whole, at the first
later turns of each form of request and now and then after; once it was not, that form is always tokenised whole.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 16 << 20  # of all conversations together, 4 bytes each
MAX_FORMS = 256
MAX_BASE_TOKENS = 16_384  # of a form, such as the descriptions of its tools; beyond it a stand-in would save little
MIN_COMPARED = 3  # later turns before a form's additions are believed
COMPARED_EACH = 64  # and from then on one of so many
MAX_NEW_RATIO = 0.5  # of a conversation's bytes; beyond it the whole costs little more
STAND_IN: Sequence[Any] = ({"role": "user", "content": "x"},)
# What shapes the answer and never the prompt; anything else that differs makes another form.
_WITHOUT = frozenset(
    (
        "messages",
        "cache_salt",  # it shapes whose conversation it is, not its prompt
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "max_tokens",
        "max_completion_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
        "top_logprobs",
        "user",
        "metadata",
        "priority",
    )
)


@dataclass(eq=False)
class PromptForm:
    """All requests that differ in their messages alone."""

    base: array[int] | None = None  # the stand-in's tokens
    num_compared: int = 0  # equal so far
    num_asked: int = 0
    additive: bool = True

    def learn_base(self, token_ids: Sequence[int] | None) -> None:
        """Take the stand-in's tokens; None when the engine does not say them."""
        if token_ids is None or len(token_ids) > MAX_BASE_TOKENS:
            self.additive = False
        else:
            self.base = array("I", token_ids)

    @property
    def is_due(self) -> bool:
        """Return whether an addition is to be compared with the whole."""
        return self.num_compared < MIN_COMPARED or self.num_asked % COMPARED_EACH == 0


@dataclass(frozen=True)
class EarlierTurn:
    """The turn before: its tokens, and the messages since."""

    token_ids: Sequence[int]
    new_messages: list[Any]


class ConversationCache:
    """Token ids of conversations by all of their messages, the least recently asked for leaving first."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._by_digest: OrderedDict[bytes, array[int]] = OrderedDict()
        self._forms: OrderedDict[bytes, PromptForm] = OrderedDict()

    def conversation(self, body: dict[str, Any]) -> Conversation | None:
        """The conversation of a chat; None where its prompt does not end with the template's own opening of an answer."""
        if body.get("continue_final_message") or body.get("add_generation_prompt") is False:
            return None
        shape = {name: value for name, value in body.items() if name not in _WITHOUT}
        form_digest = hashlib.blake2b(_bytes(shape), digest_size=16)
        digests, sizes = [], []
        salt, running = _bytes(body.get("cache_salt")), form_digest.copy()
        running.update(len(salt).to_bytes(8, "little") + salt)
        for message in body["messages"]:
            text = _bytes(message)
            running.update(len(text).to_bytes(8, "little") + text)
            digests.append(running.digest())
            sizes.append(len(text))
        return Conversation(self._form(form_digest.digest()), body["messages"], digests, sizes)

    def _form(self, digest: bytes) -> PromptForm:
        form = self._forms.setdefault(digest, PromptForm())
        self._forms.move_to_end(digest)
        if len(self._forms) > MAX_FORMS:
            self._forms.popitem(last=False)
        return form

    def earlier(self, conversation: Conversation) -> EarlierTurn | None:
        """Return the longest earlier turn that is known, when little has been added to it and additions are believed."""
        if not conversation.form.additive:
            return None
        for last in range(len(conversation.digests) - 1, 0, -1):
            found = self._by_digest.get(conversation.digests[last - 1])
            if found is not None:
                self._by_digest.move_to_end(conversation.digests[last - 1])
                is_short = sum(conversation.sizes[last:]) <= MAX_NEW_RATIO * sum(conversation.sizes)
                return EarlierTurn(found, conversation.messages[last:]) if is_short else None
        return None

    def remember(self, conversation: Conversation, token_ids: Sequence[int]) -> None:
        """Keep a turn's tokens for the next one."""
        if not conversation.digests or len(token_ids) > self._max_tokens:
            return
        digest = conversation.digests[-1]
        self._num_tokens += len(token_ids) - len(self._by_digest.pop(digest, ()))
        self._by_digest[digest] = array("I", token_ids)
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._by_digest.popitem(last=False)[1])


@dataclass(frozen=True)
class Conversation:
    """A chat's messages; `digests[i]` names its form and its first i + 1 messages, `sizes[i]` is the bytes of one."""

    form: PromptForm
    messages: list[Any]
    digests: list[bytes]
    sizes: list[int]


def _bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def extend_turn(form: PromptForm, earlier: EarlierTurn, stood_in: Sequence[int]) -> list[int] | None:
    """The whole conversation's tokens from the stand-in's with all that is new; None when the template does not just add."""
    base = form.base
    if base is None or array("I", stood_in[: len(base)]) != base:
        return None
    return [*earlier.token_ids, *stood_in[len(base) :]]


def record_comparison(form: PromptForm, guess: Sequence[int] | None, whole: Sequence[int]) -> None:
    """Learn from a whole that was tokenised beside its guess."""
    if guess is None or list(guess) != list(whole):
        form.additive = False
    else:
        form.num_compared += 1
