"""What front, prefill and decode tell each other, as records of 32-bit words.

The front sends each request to both sides at once. Decode owns the KV blocks: it allocates the prompt's and sends their
ids to prefill, which answers when the prompt lies in them. Tokens go to the front from whoever computed them, each
with its place in the answer, so that a token that comes twice after a restart is told from a new one.

The front copies between KV blocks and the agent's pool, so that no side waits for a copy: what is cached comes in before
prefill hears of the blocks (LOAD, LOADED), and what a request leaves behind goes out before they are free (LEAVE, FREE).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from prfaas.colocate.processes.ring import RingWriter

NO_STOP_TOKEN = 0xFFFFFFFF


class Kind(IntEnum):
    REQUEST = 1  # front to both, decode to prefill after a preemption or restart: Request
    CANCEL = 2  # front to decode: request
    PEER_RESTARTED = 3  # front to the surviving side: the other one is new, its rings wait at the control socket
    BLOCKS = 4  # decode to prefill: request, state slot, tokens that the blocks hold already, block ids
    DROP = 5  # decode to prefill: request; answered by DROPPED or, when it came too late, by PREFILLED
    PREFILLED = 6  # prefill to decode: request, first token
    DROPPED = 7  # prefill to decode: request
    TOKENS = 8  # both to front: (request, place in the answer, token) times any number
    LOAD = 9  # decode to front: request, state slot, block ids
    LOADED = 10  # front to decode: request, tokens that the blocks hold now, 0 when there are none
    LEAVE = 11  # decode to front: request, tokens that the blocks hold, state slot, block ids; the request has ended
    FREE = 12  # front to decode: request; nobody reads what it left any more


@dataclass(frozen=True)
class Request:
    """`tokens` is the prompt with the `num_generated` tokens that the client already has.

    `max_tokens` counts from the end of the client's own prompt. The front can load the first `num_cached` of `tokens`.
    """

    request: int
    num_generated: int
    max_tokens: int
    stop_token: int
    tokens: tuple[int, ...]
    num_cached: int = 0


def push_request(ring: RingWriter, request: Request) -> None:
    head = (request.request, request.num_generated, request.max_tokens, request.stop_token, request.num_cached)
    ring.push(Kind.REQUEST, head + request.tokens)


def read_request(words: list[int]) -> Request:
    request, num_generated, max_tokens, stop_token, num_cached, *tokens = words
    return Request(request, num_generated, max_tokens, stop_token, tuple(tokens), num_cached)
