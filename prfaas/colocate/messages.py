"""What front, prefill and decode tell each other, as records of 32-bit words.

The front sends each request to both sides at once. Decode owns the KV blocks: it allocates the prompt's and sends their
ids to prefill, which answers when the prompt lies in them. Tokens go to the front from whoever computed them, each
with its place in the answer, so that a token that comes twice after a restart is told from a new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from prfaas.colocate.ring import RingWriter

NO_STOP_TOKEN = 0xFFFFFFFF


class Kind(IntEnum):
    REQUEST = 1  # front to both, decode to prefill after a preemption or restart: Request
    CANCEL = 2  # front to decode: request
    PEER_RESTARTED = 3  # front to the surviving side: the other one is new, its rings wait at the control socket
    BLOCKS = 4  # decode to prefill: request, state slot, block ids
    DROP = 5  # decode to prefill: request; answered by DROPPED or, when it came too late, by PREFILLED
    PREFILLED = 6  # prefill to decode: request, first token
    DROPPED = 7  # prefill to decode: request
    TOKENS = 8  # both to front: (request, place in the answer, token) times any number


@dataclass(frozen=True)
class Request:
    """`tokens` is the prompt with the `num_generated` tokens that the client already has.

    `max_tokens` counts from the end of the client's own prompt.
    """

    request: int
    num_generated: int
    max_tokens: int
    stop_token: int
    tokens: tuple[int, ...]


def push_request(ring: RingWriter, request: Request) -> None:
    head = (request.request, request.num_generated, request.max_tokens, request.stop_token)
    ring.push(Kind.REQUEST, head + request.tokens)


def read_request(words: list[int]) -> Request:
    request, num_generated, max_tokens, stop_token, *tokens = words
    return Request(request, num_generated, max_tokens, stop_token, tuple(tokens))
