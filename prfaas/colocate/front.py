"""The requests as the front knows them: what each has got so far, what to send to which side, what to send again.

No process and no clock here. After the death of either side its rings are read to the end and replaced; decode tells a
new prefill what it waits for, the front tells both sides of everything that lives when decode is new.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prfaas.colocate.processes import ring
from prfaas.colocate.processes.messages import NO_STOP_TOKEN, Kind, Request, push_request
from prfaas.colocate.processes.ring import RingReader, RingWriter
from prfaas.colocate.processes.shared_memory import SIDES, Side
from prfaas.errors import LocalProtocolError


@dataclass
class Answer:
    """A request that lives: its prompt and the tokens that came. `on_token(token, finished)` is called for each once.

    The pool can load the first `num_cached` tokens of its prompt, once.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop_token: int
    on_token: Callable[[int, bool], None]
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list)

    def finished(self) -> bool:
        return len(self.tokens) >= self.max_tokens or self.tokens[-1:] == [self.stop_token]


@dataclass(frozen=True)
class Blocks:
    """Places of a request's KV: block ids in order, and the state slot."""

    slot: int
    blocks: tuple[int, ...]


class BlockKeeper(Protocol):
    """Copies between KV blocks and the agent's pool. Answers by `Front.loaded` and `Front.free`, whenever it is done."""

    def load(self, request: int, blocks: Blocks) -> None: ...

    def leave(self, request: int, tokens: tuple[int, ...], blocks: Blocks) -> None:
        """`tokens` are those that the blocks hold; the request has ended."""
        ...


@dataclass(frozen=True)
class PeerRings:
    """The two rings of one side to the other one, as descriptors that the receiver owns: (read this, write that)."""

    reads: int
    writes: int


@dataclass(frozen=True)
class SideRings:
    """All rings of one side."""

    from_front: int
    to_front: int
    peer: PeerRings


class Front:
    """Mutable; one owner. `wake` are the eventfds that wake each side and the front; they outlive every process.

    With a `keeper` decode hands over what complete requests leave behind; it may read that until it answers.
    """

    def __init__(self, wake: Mapping[str, int], keeper: BlockKeeper | None = None) -> None:
        self._wake, self._keeper = wake, keeper
        self._answers: dict[int, Answer] = {}
        self._ended: dict[int, tuple[int, ...]] = {}  # tokens of complete requests that decode has not handed over
        self._kept: set[int] = set()  # Requests whose blocks the keeper has from this decode process.
        self._next_request = 1
        self._readers: dict[Side, RingReader] = {}
        self._writers: dict[Side, RingWriter] = {}

    def open(self) -> dict[Side, SideRings]:
        """Return the rings of both sides for their first start."""
        peers = _peer_rings()
        return {side: SideRings(*self._front_rings(side), peers[side]) for side in SIDES}

    def replace(self, side: Side) -> tuple[SideRings, PeerRings]:
        """After the death of `side`: the rings of its successor, and those that the survivor changes to.

        The survivor must have the latter at hand (in its control socket) before it next reads its ring.
        """
        self.poll()
        if side == "decode":
            self._ended.clear()
            self._kept.clear()
        self._readers.pop(side).close()
        self._writers.pop(side).close()
        peers = _peer_rings()
        rings = SideRings(*self._front_rings(side), peers[side])
        return rings, peers["decode" if side == "prefill" else "prefill"]

    def announce(self, side: Side) -> None:
        """Tell the survivor that `side` is new, and a new decode of all that lives."""
        survivor: Side = "decode" if side == "prefill" else "prefill"
        self._writers[survivor].push(Kind.PEER_RESTARTED, ())
        if side == "decode":
            for request, answer in self._answers.items():
                self._send(request, answer)

    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        *,
        stop_token: int | None,
        on_token: Callable[[int, bool], None],
        num_cached: int = 0,
    ) -> int:
        """Send a request to both sides at once; returns its number. The keeper can load its first `num_cached` tokens."""
        request, self._next_request = self._next_request, self._next_request + 1
        answer = Answer(prompt, max_tokens, NO_STOP_TOKEN if stop_token is None else stop_token, on_token, num_cached)
        self._send(request, answer)
        self._answers[request] = answer  # Messages that could not be sent are not repeated after a death.
        return request

    def lives(self, request: int) -> bool:
        return request in self._answers

    def cancel(self, request: int) -> bool:
        """Return the client has gone; False when the request has ended before."""
        lives = self._answers.pop(request, None) is not None
        if lives:
            self._writers["decode"].push(Kind.CANCEL, (request,))
        return lives

    def loaded(self, request: int, num_tokens: int) -> None:
        """The keeper has put the first `num_tokens` tokens into the request's blocks; 0 when it has not."""
        if request in self._kept:
            self._kept.remove(request)
            self._writers["decode"].push(Kind.LOADED, (request, num_tokens))

    def free(self, request: int) -> None:
        """The keeper does not read the blocks of a complete request any more."""
        if request in self._kept:
            self._kept.remove(request)
            self._writers["decode"].push(Kind.FREE, (request,))

    def give_up(self) -> list[Answer]:
        """Forget everything that lives and return it, when no side can be started any more."""
        answers, self._answers = list(self._answers.values()), {}
        return answers

    def poll(self) -> bool:
        """Take the tokens that came, send what waited for room; whether all of it could be sent."""
        from_decode = self._readers["decode"].drain() if "decode" in self._readers else []
        from_prefill = self._readers["prefill"].drain() if "prefill" in self._readers else []
        # Prefill wrote a request's first token before decode could write its second.
        for kind, words in from_prefill + from_decode:
            if kind == Kind.TOKENS:
                for i in range(0, len(words), 3):
                    self._token(*words[i : i + 3])
            else:
                self._keep(kind, words)
        flushed = [writer.flush() for writer in self._writers.values()]  # Flush all writers, also after a full one.
        return all(flushed)

    @property
    def num_live(self) -> int:
        return len(self._answers)

    def close(self) -> None:
        for end in (*self._readers.values(), *self._writers.values()):
            end.close()
        self._readers, self._writers = {}, {}

    def _token(self, request: int, place: int, token: int) -> None:
        answer = self._answers.get(request)
        if answer is None or place < len(answer.tokens):
            return  # The request was cancelled, has ended, or is recomputed after a restart.
        if place > len(answer.tokens):
            raise LocalProtocolError(f"request {request}: token {place} came after {len(answer.tokens)} tokens")
        answer.tokens.append(token)
        finished = answer.finished()
        if finished:
            del self._answers[request]
            if self._keeper is not None:
                self._ended[request] = answer.prompt + tuple(answer.tokens)
        answer.on_token(token, finished)

    def _keep(self, kind: int, words: list[int]) -> None:
        """Lend blocks to the keeper, unless the request's client has gone."""
        assert self._keeper is not None
        request = words[0]
        self._kept.add(request)
        if kind == Kind.LOAD:
            answer = self._answers.get(request)
            if answer is None:
                self.loaded(request, 0)
                return
            answer.num_cached = 0
            self._keeper.load(request, Blocks(words[1], tuple(words[2:])))
        elif request in self._ended:
            num_tokens, slot, *blocks = words[1:]
            self._keeper.leave(request, self._ended.pop(request)[:num_tokens], Blocks(slot, tuple(blocks)))
        else:
            self.free(request)

    def _send(self, request: int, answer: Answer) -> None:
        tokens = answer.prompt + tuple(answer.tokens)
        message = Request(request, len(answer.tokens), answer.max_tokens, answer.stop_token, tokens, answer.num_cached)
        for side in SIDES:
            push_request(self._writers[side], message)

    def _front_rings(self, side: Side) -> tuple[int, int]:
        """New rings from and to the front; the returned descriptors are the side's own."""
        down, up = ring.create(), ring.create()
        self._writers[side] = RingWriter(os.dup(down), self._wake[side])
        self._readers[side] = RingReader(os.dup(up))
        return down, up


def _peer_rings() -> dict[Side, PeerRings]:
    """Return one pair of rings between the sides, as each of them sees it."""
    to_prefill, to_decode = ring.create(), ring.create()
    return {"prefill": PeerRings(to_prefill, to_decode), "decode": PeerRings(os.dup(to_decode), os.dup(to_prefill))}
