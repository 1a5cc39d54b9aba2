"""The process of one side: maps what it is given, then turns its loop until the supervisor has gone."""

from __future__ import annotations

import select
import socket

from prfaas.colocate.decode.loop import Adaptation, DecodeLoop
from prfaas.colocate.decode.request_table import DecodeBook
from prfaas.colocate.device import devices, memory
from prfaas.colocate.device.runner import Runner
from prfaas.colocate.front import PeerRings
from prfaas.colocate.prefill.loop import PrefillLoop
from prfaas.colocate.processes.ring import RingReader, RingWriter, clear_wakeups
from prfaas.colocate.processes.setup import SideFds, SideSetup, receive_peer_rings, receive_setup
from prfaas.colocate.processes.shared_memory import Board
from prfaas.scheduler.colocation import SharingPolicy

IDLE_MILLISECONDS = 1000


def run(control: socket.socket) -> int:
    """Serve until the control socket closes; the exit status."""
    setup, fds = receive_setup(control)
    loop = build_loop(setup, fds, control)
    poller = select.poll()
    poller.register(fds.wake_self, select.POLLIN)
    poller.register(control.fileno(), 0)  # Poll for hang-up only.
    busy = True
    while not any(event[1] & select.POLLHUP for event in poller.poll(0 if busy else IDLE_MILLISECONDS)):
        clear_wakeups(fds.wake_self)
        busy = loop.turn()
    return 0


def build_loop(setup: SideSetup, fds: SideFds, control: socket.socket) -> PrefillLoop | DecodeLoop:
    """Return the side's loop over the mapped memory."""
    runner = build_runner(setup, fds)
    board = Board(fds.board)
    front = RingReader(fds.rings.from_front), RingWriter(fds.rings.to_front, fds.wake_front)

    def ends(peer: PeerRings) -> tuple[RingReader, RingWriter]:
        return RingReader(peer.reads), RingWriter(peer.writes, fds.wake_peer)

    def next_peer() -> tuple[RingReader, RingWriter]:
        return ends(receive_peer_rings(control))

    peer = ends(fds.rings.peer)
    if setup.side == "prefill":
        return PrefillLoop(runner, board, front=front, peer=peer, peer_rings=next_peer)
    book = DecodeBook(setup.cache, max_rows=setup.max_rows, hands_over=setup.hands_over)
    adaptation = None
    if setup.profile is not None:
        adaptation = Adaptation(setup.profile, SharingPolicy(setup.itl_slo_seconds, setup.dwell_steps))
    return DecodeLoop(book, runner, board, front=front, peer=peer, peer_rings=next_peer, adaptation=adaptation)


def build_runner(setup: SideSetup, fds: SideFds) -> Runner:
    """Return the side's runner over the mapped weights, keys and values, and states."""
    flat, kv, states = (memory.attach(plain, fd) for plain, fd in zip(setup.tensors, fds.memory, strict=True))
    model = devices.model_on(setup.shape, setup.cache, (flat, kv, states), max_tokens=setup.max_tokens)
    return devices.runner_on(
        model,
        setup.side,
        partition=setup.partition,
        max_rows=setup.max_rows,
        max_blocks=setup.cache.blocks_for(setup.max_tokens),
        num_threads=setup.num_threads,
    )
