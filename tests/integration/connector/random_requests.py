"""What random lives of requests are made of, in whichever engine."""

from __future__ import annotations

import random
from typing import Any

from tests.integration.connector.nodes import prompt_of

KINDS = ("transferred",) * 6 + ("local",) * 2 + ("refused", "never sent")
MAX_TOKENS = 500
REUSE: dict[str, Any] = {"reuse": True, "reuse_min_tokens": 16}
PATIENT_AGENTS: dict[str, Any] = {"open_timeout_seconds": "1s", "reconnect_seconds": "1s"}
# Of connectors. Nothing but what the test is about ends a wait: who is not told of an end waits, and is seen to.
PATIENT = dict.fromkeys(("open_wait_seconds", "hold_wait_seconds", "receive_timeout_seconds"), 3600.0)
_SHARED = range(2, 7)  # prompts of which requests share the beginnings


def random_prompt(source: random.Random, *, own: int, least: int) -> list[int]:
    """A prompt of its own, a part of a shared one, or one that leaves a shared one anywhere. `own` is nobody else's number."""
    length, shared = source.randrange(least, MAX_TOKENS), source.choice(_SHARED)
    num_shared = source.choice([0, 0, length, source.randrange(1, length)])
    if not num_shared:
        return prompt_of(1000 + own, length)
    branch = prompt_of(1000 + own, length - num_shared) if num_shared < length else []
    return prompt_of(shared, num_shared) + branch
