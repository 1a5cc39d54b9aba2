"""Question in English to a small model with real weights, answered over the link and by the decode engine alone."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tools.demo.client import complete
from tools.demo.rows import CHUNK_TOKENS, Scene, early_ratio, transfer_of

DOCUMENT = Path(__file__).parents[2] / "LICENSE"  # The answer of so small a model depends on every word before it.
QUESTION = "In one sentence: what is the capital of France, and what is it famous for?"
PROMPT_TOKENS = 4 * CHUNK_TOKENS + 1  # Both engines compute the last token alone, so that 16-bit results are the same.
MAX_ANSWER_TOKENS = 64


@dataclass(frozen=True)
class EnglishAnswer:
    """Answer over the remote route, with the figures of its transfer and of the local computation."""

    text: str
    route: str
    remote_seconds: float
    local_seconds: float
    wire_bytes: int
    early_ratio: float | None
    outcome: str  # Of the transfer.
    is_equal: bool

    def describe(self) -> str:
        """Return the question, the answer and the figures as lines for people."""
        hidden = (
            f"the transfer ended as {self.outcome!r}, so west computed the prompt"
            if self.early_ratio is None
            else f"{self.early_ratio:.0%} of it hidden behind prefill"
        )
        answer = textwrap.fill(" ".join(self.text.split()), 100, initial_indent="  ", subsequent_indent="  ")
        return (
            f"Question to SmolLM2-135M-Instruct, after {PROMPT_TOKENS:,} tokens:\n  {QUESTION}\n"
            f"Answer ({self.route} route):\n{answer}\n"
            f"Time to the first token: {self.remote_seconds:.2f} s with remote prefill, "
            f"{self.local_seconds:.2f} s computed locally\n"
            f"KV over the link: {self.wire_bytes / 1e6:.1f} MB, {hidden}\n"
            f"Same tokens as the local answer: {'yes' if self.is_equal else 'NO'}\n"
        )


def ask(scene: Scene, model: Path) -> EnglishAnswer:
    """Send the question to the decode engine alone, then through the router.

    The first answer also teaches the engine its speed, from which it decides whether to wait for KV.
    """
    prompt = _prompt(Tokenizer.from_file(str(model / "tokenizer.json")))
    body: dict[str, Any] = {
        "model": scene.model,
        "prompt": prompt,
        "max_tokens": MAX_ANSWER_TOKENS,
        "temperature": 0,
    }
    scene.say(f"a question in English after {len(prompt)} tokens, to west's engine alone")
    local = complete(scene.engine_urls["west"], body | {"cache_salt": "local"})
    scene.say("the same question through the router")
    remote = complete(scene.router_url, body)
    is_remote = "x-prfaas-transfer" in remote.headers
    sent = transfer_of(scene, "east", remote) if is_remote else None
    received: dict[str, Any] = {"wire_bytes": 0, "outcome": "not begun"}
    if is_remote:
        received = transfer_of(scene, "west", remote)
    return EnglishAnswer(
        text=remote.text,
        route=remote.headers["x-prfaas-route"],
        remote_seconds=remote.ttft_seconds,
        local_seconds=local.ttft_seconds,
        wire_bytes=received["wire_bytes"],
        early_ratio=early_ratio(sent),
        outcome=received["outcome"],
        is_equal=remote.token_ids == local.token_ids,
    )


def _prompt(tokenizer: Tokenizer) -> list[int]:
    """Return a chat of one turn: a document, cut so that the prompt has `PROMPT_TOKENS`, and the question."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    opening = encode("<|im_start|>user\nHere is a document.\n\n")
    closing = encode(f"\n\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    document = encode(DOCUMENT.read_text())
    return opening + document[: PROMPT_TOKENS - len(opening) - len(closing)] + closing
