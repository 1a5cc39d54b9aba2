"""What a scheduler asks before its engine's workers are attached: so much of it is kept."""

from __future__ import annotations

import socket

from prfaas.agent.engine.protocol import LENGTH_BYTES, PROTOCOL_VERSION, Attach, Receive, TransferFailed, decode
from prfaas.agent.engine.server import MAX_PENDING_CLAIMS, EngineConnection, PendingClaims
from prfaas.hashing import NO_HASH
from prfaas.types import TransferId


def test_pending_claims_beyond_the_limit_fail_at_once() -> None:
    ours, theirs = socket.socketpair()
    early, attach = PendingClaims(), Attach(PROTOCOL_VERSION, "w/0", "scheduler", 0, None)
    engine = EngineConnection(attach, None, None, None, ours)
    asked = [
        Receive(TransferId(number.to_bytes(16, "big")), b"", NO_HASH, ()) for number in range(MAX_PENDING_CLAIMS + 1)
    ]
    for its in asked:
        early.add(engine, its)
    said = decode(engine.outbox.get_nowait()[LENGTH_BYTES:])
    assert isinstance(said, TransferFailed) and said.transfer_id == asked[-1].transfer_id
    assert engine.outbox.empty()
    assert [its for _, its in early.take("w/0")] == asked[:-1] and len(early) == 0
    ours.close()
    theirs.close()
