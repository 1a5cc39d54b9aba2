"""Token ids of later turns, of which only the new messages are tokenised.

Most chat templates are additive: the rendering of a conversation begins with its rendering one turn earlier.
The new tokens are then those of a short stand-in, a question of one word followed by the new messages, without the tokens
of that question alone. The router compares the result with the whole rendering at the first later turns of each form of
request, and occasionally afterwards. After a difference it always tokenises that form as a whole.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 16 << 20  # Cached tokens of all conversations together, 4 bytes each.
MAX_FORMS = 256
MAX_BASE_TOKENS = 16_384  # With a longer form, such as many tools, a stand-in would save little.
MIN_COMPARED = 3  # Equal comparisons after which a form counts as additive.
COMPARE_EVERY = 64
MAX_NEW_RATIO = 0.5  # If more than this share of the bytes is new, tokenising everything costs little more.
STAND_IN: Sequence[Any] = ({"role": "user", "content": "x"},)
# Fields that never shape the prompt's form. The salt identifies the conversation's owner instead.
_NOT_IN_FORM = frozenset(
    (
        "messages",
        "cache_salt",
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


@dataclass(frozen=True)
class EarlierTurn:
    """Tokens of an earlier turn, and the messages since."""

    token_ids: Sequence[int]
    new_messages: list[Any]


@dataclass(eq=False)
class PromptForm:
    """All requests that differ only in their messages. `base` are the tokens of the stand-in alone."""

    base: array[int] | None = None
    num_compared: int = 0
    num_asked: int = 0
    additive: bool = True

    @property
    def is_due(self) -> bool:
        """Return whether a guess is to be compared with a full tokenisation."""
        return self.num_compared < MIN_COMPARED or self.num_asked % COMPARE_EVERY == 0

    def learn_base(self, token_ids: Sequence[int] | None) -> None:
        """Take the stand-in's tokens; None if the engine does not provide them."""
        if token_ids is None or len(token_ids) > MAX_BASE_TOKENS:
            self.additive = False
        else:
            self.base = array("I", token_ids)

    def extend(self, earlier: EarlierTurn, stand_in: Sequence[int]) -> list[int] | None:
        """Return the tokens of a whole turn from those of the stand-in with the new messages; None if it is not additive."""
        if self.base is None or array("I", stand_in[: len(self.base)]) != self.base:
            return None
        return [*earlier.token_ids, *stand_in[len(self.base) :]]

    def compare(self, guess: Sequence[int] | None, whole: Sequence[int]) -> None:
        """Compare a guess with the fully tokenised prompt."""
        if guess is None or list(guess) != list(whole):
            self.additive = False
        else:
            self.num_compared += 1


@dataclass(frozen=True)
class Conversation:
    """Messages of a chat. `digests[i]` identifies the form and the messages up to i; `sizes[i]` are the bytes of message i."""

    form: PromptForm
    messages: list[Any]
    digests: list[bytes]
    sizes: list[int]


class ConversationCache:
    """Token ids of conversations, found by all of their messages. The least recently used conversation is dropped first."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._by_digest: OrderedDict[bytes, array[int]] = OrderedDict()
        self._forms: OrderedDict[bytes, PromptForm] = OrderedDict()

    def conversation(self, body: dict[str, Any]) -> Conversation | None:
        """Return the conversation of a chat; None if its prompt does not end with the template's opening of an answer."""
        if body.get("continue_final_message") or body.get("add_generation_prompt") is False:
            return None
        shape = {name: value for name, value in body.items() if name not in _NOT_IN_FORM}
        form_digest = hashlib.blake2b(_encode(shape), digest_size=16)
        digests, sizes = [], []
        salt, running = _encode(body.get("cache_salt")), form_digest.copy()
        running.update(len(salt).to_bytes(8, "little") + salt)
        for message in body["messages"]:
            text = _encode(message)
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
        """Return the longest known earlier turn, if its form is additive and little is new."""
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
        """Keep the tokens of a turn for the next one."""
        if not conversation.digests or len(token_ids) > self._max_tokens:
            return
        digest = conversation.digests[-1]
        self._num_tokens += len(token_ids) - len(self._by_digest.pop(digest, ()))
        self._by_digest[digest] = array("I", token_ids)
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._by_digest.popitem(last=False)[1])


def _encode(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
