"""Claims that wait until the workers of their engine are attached."""

from __future__ import annotations

import socket

from prfaas.agent.engine.protocol import LENGTH_BYTES, PROTOCOL_VERSION, Attach, Receive, TransferFailed, decode
from prfaas.agent.engine.server import MAX_PENDING_CLAIMS, EngineConnection, PendingClaims
from prfaas.hashing import NO_HASH
from prfaas.types import TransferId


def test_pending_claims_beyond_the_limit_fail_at_once() -> None:
    agent_end, engine_end = socket.socketpair()
    pending, attach = PendingClaims(), Attach(PROTOCOL_VERSION, "w/0", "scheduler", 0, None)
    engine = EngineConnection(attach, None, None, None, agent_end)
    claims = [
        Receive(TransferId(number.to_bytes(16, "big")), b"", NO_HASH, ()) for number in range(MAX_PENDING_CLAIMS + 1)
    ]
    for claim in claims:
        pending.add(engine, claim)
    answer = decode(engine.outbox.get_nowait()[LENGTH_BYTES:])
    assert isinstance(answer, TransferFailed) and answer.transfer_id == claims[-1].transfer_id
    assert engine.outbox.empty()
    assert [claim for _, claim in pending.take("w/0")] == claims[:-1] and len(pending) == 0
    agent_end.close()
    engine_end.close()
