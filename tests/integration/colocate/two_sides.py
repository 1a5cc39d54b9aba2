"""Front, prefill loop and decode loop in one process, turned by hand: every interleaving and every death can be played."""

from __future__ import annotations

import os
from collections import deque

from prfaas.colocate.decode.loop import Adaptation, DecodeLoop
from prfaas.colocate.decode.request_table import DecodeBook
from prfaas.colocate.device.cpu import CpuRunner
from prfaas.colocate.device.runner import Runner
from prfaas.colocate.front import Front, PeerRings, SideRings
from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.model.model import HybridModel
from prfaas.colocate.prefill.loop import PrefillLoop
from prfaas.colocate.processes import shared_memory
from prfaas.colocate.processes.ring import RingReader, RingWriter
from prfaas.colocate.processes.shared_memory import Board, Side
from tests.integration.colocate.shelf import Shelf


class TwoSides:
    """Supervisor without processes: real rings, real model, real loops."""

    def __init__(
        self,
        model: HybridModel,
        shape: CacheShape,
        *,
        max_rows: int = 4,
        adaptation: Adaptation | None = None,
        keeps: bool = False,
        runner: Runner | None = None,
    ):
        self.runner = runner
        self.shelf = Shelf(model.cache) if keeps else None
        self.model, self.shape, self.max_rows, self.adaptation = model, shape, max_rows, adaptation
        self.wake = {name: os.eventfd(0, os.EFD_NONBLOCK) for name in ("prefill", "decode", "front")}
        self.board_fd = shared_memory.create()
        self.board = Board(os.dup(self.board_fd))
        self.front = Front(self.wake, self.shelf)
        if self.shelf is not None:
            self.shelf.front = self.front
        self.peers: dict[Side, deque[PeerRings]] = {"prefill": deque(), "decode": deque()}
        self.loops: dict[Side, PrefillLoop | DecodeLoop] = {}
        for side, rings in self.front.open().items():
            self.start(side, rings)

    def start(self, side: Side, rings: SideRings) -> None:
        self.peers[side].clear()
        changed = "decode" if side == "prefill" else "prefill"
        front = RingReader(rings.from_front), RingWriter(rings.to_front, self.wake["front"])

        def ends(peer: PeerRings) -> tuple[RingReader, RingWriter]:
            return RingReader(peer.reads), RingWriter(peer.writes, self.wake[changed])

        def next_peer() -> tuple[RingReader, RingWriter]:
            return ends(self.peers[side].popleft())

        runner = self.runner or CpuRunner(self.model, max_rows=self.max_rows, max_blocks=self.shape.num_blocks)
        shared = Board(os.dup(self.board_fd))
        if side == "prefill":
            self.loops[side] = PrefillLoop(runner, shared, front=front, peer=ends(rings.peer), peer_rings=next_peer)
        else:
            self.book = DecodeBook(self.shape, max_rows=self.max_rows, hands_over=self.shelf is not None)
            self.loops[side] = DecodeLoop(
                self.book,
                runner,
                shared,
                front=front,
                peer=ends(rings.peer),
                peer_rings=next_peer,
                adaptation=self.adaptation,
            )

    def close(self) -> None:
        self.front.close()
        for fd in (*self.wake.values(), self.board_fd):
            os.close(fd)

    def turn(self, who: str) -> bool:
        if who == "front":
            return self.front.poll()
        if who == "shelf":
            return self.shelf is not None and self.shelf.turn()
        return self.loops["prefill" if who == "prefill" else "decode"].turn()

    def kill(self, side: Side) -> None:
        """The loop is gone with all it knew; what it had pushed stays in the rings."""
        rings, survivors = self.front.replace(side)
        if side == "decode" and self.shelf is not None:
            self.shelf.decode_lost()
        self.peers["decode" if side == "prefill" else "prefill"].append(survivors)
        self.start(side, rings)
        self.front.announce(side)

    def finish(self, max_turns: int = 5000) -> None:
        for _ in range(max_turns):
            self.turn("prefill"), self.turn("decode"), self.turn("front"), self.turn("shelf")
            if self.front.num_live == 0 and self.book.is_idle():
                return
        raise AssertionError(f"{self.front.num_live} requests still live after {max_turns} turns")
