"""OPENs without a grant, from a peer that knows the secret, cost an agent little memory."""

from __future__ import annotations

import os
from pathlib import Path

import msgpack

from prfaas import grants
from prfaas.transport.protocol.messages import MAX_BODY_BYTES, ObjectSizes, Open, decode_ending, encode_open
from prfaas.transport.protocol.wire import FrameType
from tests.support.agents import Agents
from tests.support.raw_peers import RawSender
from tests.support.waiting import PATIENCE_SECONDS
from tools.demo.client import get_json

MIB = 1 << 20
OPEN = b"\x95\xa4open" + msgpack.packb(bytes(100))
NUM_ITEMS = MAX_BODY_BYTES - len(OPEN) - 5
# Unpacked, these take a gigabyte.
EMPTY_LISTS = b"\xdd" + NUM_ITEMS.to_bytes(4, "big") + b"\x90" * NUM_ITEMS


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


def test_hostile_opens_take_no_more_memory_than_their_bytes(processes: Agents) -> None:
    west = processes.start("west")
    peak = _peak_bytes(west.process.pid)
    key = grants.derive_key(processes.secret, "wire")
    with RawSender(west.wire, name="east", peer="west", key=key) as raw:
        for before in (b"", OPEN, b"\x92\xaalink_probe"):
            for sizes in ([], [100]):
                opened = Open(ObjectSizes.of(sizes), 0, PATIENCE_SECONDS, before + EMPTY_LISTS)
                raw.connection.write(encode_open(os.urandom(16), opened))
                header, body = raw.heard()
                assert header.type is FrameType.ERROR
                assert decode_ending(body).reason == ("grant_refused" if before == OPEN else "protocol")
    assert _peak_bytes(west.process.pid) - peak < 128 * MIB
    assert get_json(f"http://{west.status}/healthz")
