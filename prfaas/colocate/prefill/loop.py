"""The prefill process's loop: whole prompts, one after the other, in the order in which decode gave them blocks.

Two prompts are under way at most: the next one is launched while the device still computes the one before.
A prompt is never cut. Once its KV lies in its blocks, the front gets the first token and decode a word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from prfaas.colocate.device.runner import Runner, Step
from prfaas.colocate.prefill.queue import PrefillQueue, Prompt
from prfaas.colocate.processes.messages import Kind, read_request
from prfaas.colocate.processes.ring import RingReader, RingWriter
from prfaas.colocate.processes.shared_memory import Board, Word

MAX_UNDER_WAY = 2

PeerRings = Callable[[], tuple[RingReader, RingWriter]]


class PrefillLoop:
    """`turn` until the process ends; `peer_rings` fetches the rings to a new decode process."""

    def __init__(
        self,
        runner: Runner,
        board: Board,
        *,
        front: tuple[RingReader, RingWriter],
        peer: tuple[RingReader, RingWriter],
        peer_rings: PeerRings,
    ) -> None:
        self._runner, self._board = runner, board
        self._from_front, self._to_front = front
        self._from_decode, self._to_decode = peer
        self._peer_rings = peer_rings
        self._queue = PrefillQueue()
        self._under_way: deque[tuple[Prompt, Step]] = deque()
        board[Word.PREFILL_BUSY] = 0

    def turn(self) -> bool:
        """Take what came, launch a prompt, report finished ones; False when only a message can give more to do."""
        self._take_messages()
        launched = self._launch()
        self._report(wait=not launched)
        self._board[Word.PREFILL_BUSY] = len(self._under_way)
        flushed = self._to_front.flush() & self._to_decode.flush()
        return launched or bool(self._under_way) or not flushed

    def _take_messages(self) -> None:
        # Decode speaks of requests that the front sent first: read decode's ring first, then act on the front's first.
        from_decode = self._from_decode.drain()
        for kind, words in self._from_front.drain():
            if kind == Kind.REQUEST:
                self._queue.add(read_request(words))
            elif kind == Kind.PEER_RESTARTED:
                from_decode = []
                self._meet_new_decode()
        for kind, words in from_decode:
            self._take_from_decode(kind, words)

    def _take_from_decode(self, kind: int, words: list[int]) -> None:
        if kind == Kind.BLOCKS:
            self._queue.blocks(words[0], words[1], words[3:], num_cached=words[2])
        elif kind == Kind.REQUEST:
            self._queue.add(read_request(words))
        elif kind == Kind.DROP and self._queue.drop(words[0]):
            self._to_decode.push(Kind.DROPPED, words)

    def _meet_new_decode(self) -> None:
        """The block ids of the old decode process mean nothing any more; nothing may write there once the new one speaks."""
        while self._under_way:
            self._under_way.popleft()[1].tokens()
        self._queue = PrefillQueue()
        self._from_decode.close()
        self._to_decode.close()
        self._from_decode, self._to_decode = self._peer_rings()

    def _launch(self) -> bool:
        prompt = self._queue.next() if len(self._under_way) < MAX_UNDER_WAY else None
        if prompt is None:
            return False
        self._board[Word.PREFILL_BUSY] = len(self._under_way) + 1
        share = self._board.share(Word.PREFILL_SHARE)
        self._under_way.append((prompt, self._runner.prefill(prompt, share=share)))
        return True

    def _report(self, *, wait: bool) -> None:
        """Report what has ended; `wait` for the oldest prompt when there is nothing else to do."""
        while self._under_way and (wait or self._under_way[0][1].done()):
            wait = False
            prompt, step = self._under_way.popleft()
            request, token = prompt.request, step.tokens()[0]
            self._board.add(Word.PREFILL_STEPS)
            # The front first: it reads decode's ring before this one, so it never sees a token before the one before it.
            self._to_front.push(Kind.TOKENS, (request.request, request.num_generated, token))
            self._to_decode.push(Kind.PREFILLED, (request.request, token))
