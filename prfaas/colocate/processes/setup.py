"""Control packets to a starting side, and to a survivor whose peer was restarted. Descriptors travel beside them."""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass
from typing import Any

import msgpack

from prfaas.colocate.front import PeerRings, SideRings
from prfaas.colocate.model.cache import CacheShape
from prfaas.colocate.processes.shared_memory import Side
from prfaas.errors import RemoteProtocolError
from prfaas.model.cost.colocation import ShareTable

MAX_PACKET_BYTES = 1 << 16
MAX_FDS = 16
CONTROL_DEADLINE_SECONDS = 30.0  # The packet is queued before the wake-up, so only a stopped sender is this late.


@dataclass(frozen=True)
class SideSetup:
    """Everything but descriptors. `tensors` describe weights, keys and values, states, in this order."""

    side: Side
    shape: str
    cache: CacheShape
    max_rows: int
    max_tokens: int
    partition: str
    tensors: tuple[dict[str, Any], ...]
    profile: ShareTable | None = None
    itl_slo_seconds: float = 0.0
    dwell_steps: int = 16
    num_threads: int = 0
    hands_over: bool = False  # Decode passes the KV of finished requests to the front.


@dataclass(frozen=True)
class SideFds:
    """File descriptors of a start, owned by the receiver. `memory` has the tensors' memfds."""

    rings: SideRings
    board: int
    wake_self: int
    wake_front: int
    wake_peer: int
    memory: tuple[int, ...] = ()

    def flat(self) -> list[int]:
        rings = self.rings
        first = [rings.from_front, rings.to_front, rings.peer.reads, rings.peer.writes]
        return [*first, self.board, self.wake_self, self.wake_front, self.wake_peer, *self.memory]


def send_setup(control: socket.socket, setup: SideSetup, fds: SideFds) -> None:
    """Send a start; the ring descriptors are closed here, the others stay the caller's."""
    socket.send_fds(control, [msgpack.packb(dataclasses.asdict(setup))], fds.flat())
    close_rings(fds.rings)


def receive_setup(control: socket.socket) -> tuple[SideSetup, SideFds]:
    plain, fds = _receive(control)
    try:
        profile = plain.pop("profile")
        cache = CacheShape(**plain.pop("cache"))
        setup = SideSetup(cache=cache, profile=_profile(profile), **plain)
        rings = SideRings(fds[0], fds[1], PeerRings(fds[2], fds[3]))
        return setup, SideFds(rings, fds[4], fds[5], fds[6], fds[7], tuple(fds[8:]))
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise RemoteProtocolError("malformed", f"not a setup: {error}") from error


def send_peer_rings(control: socket.socket, rings: PeerRings) -> None:
    """Give a survivor its rings to the new peer, and close ours. A survivor that has just died is no error here."""
    try:
        socket.send_fds(control, [b"\x80"], [rings.reads, rings.writes])  # An empty map.
    except OSError:
        pass
    finally:
        os.close(rings.reads)
        os.close(rings.writes)


def receive_peer_rings(control: socket.socket) -> PeerRings:
    _, fds = _receive(control)
    if len(fds) != 2:
        raise RemoteProtocolError("malformed", f"a new peer has two rings, got {len(fds)}")
    return PeerRings(*fds)


def close_rings(rings: SideRings) -> None:
    for fd in (rings.from_front, rings.to_front, rings.peer.reads, rings.peer.writes):
        os.close(fd)


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    control.settimeout(CONTROL_DEADLINE_SECONDS)
    packet, fds, _, _ = socket.recv_fds(control, MAX_PACKET_BYTES, MAX_FDS)
    if not packet:
        raise RemoteProtocolError("closed", "the supervisor has gone")
    plain = msgpack.unpackb(packet)
    if not isinstance(plain, dict):
        raise RemoteProtocolError("malformed", "a control packet is a map")
    return plain, fds


def _profile(plain: dict[str, Any] | None) -> ShareTable | None:
    if plain is None:
        return None
    seconds = tuple(tuple(row) for row in plain["seconds"])
    return ShareTable(tuple(plain["shares"]), tuple(plain["batches"]), seconds, tuple(plain["overallocated_seconds"]))
