"""Messages between front, prefill and decode, as records of 32-bit words.

The front sends each request to both sides at once. Decode owns the KV blocks: it allocates blocks for the prompt and
sends the ids to prefill, which answers when the prompt is computed. Both sides send tokens to the front, each with the
position in the answer. After a restart, the front recognises repeated tokens by position.

The front copies between KV blocks and the agent's pool, so that no side waits for a copy. Cached blocks are loaded before
prefill gets the block ids (LOAD, LOADED). Blocks of finished requests are stored before they are freed (LEAVE, FREE).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from prfaas.colocate.processes.ring import RingWriter

NO_STOP_TOKEN = 0xFFFFFFFF


class Kind(IntEnum):
    REQUEST = 1  # Front to both; decode to prefill after a preemption or restart: Request.
    CANCEL = 2  # Front to decode: request.
    PEER_RESTARTED = 3  # Front to the surviving side; the new rings wait at the control socket.
    BLOCKS = 4  # Decode to prefill: request, state slot, cached tokens, block ids.
    DROP = 5  # Decode to prefill: request. Prefill answers DROPPED, or PREFILLED if too late.
    PREFILLED = 6  # Prefill to decode: request, first token.
    DROPPED = 7  # Prefill to decode: request.
    TOKENS = 8  # Both to front: any number of (request, position in the answer, token).
    LOAD = 9  # Decode to front: request, state slot, block ids.
    LOADED = 10  # Front to decode: request, tokens now in the blocks (0 for none).
    LEAVE = 11  # Decode to front: ended request, tokens in the blocks, state slot, block ids.
    FREE = 12  # Front to decode: request whose blocks nobody reads any more.


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
