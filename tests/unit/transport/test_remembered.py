"""How ended transfers ended."""

from __future__ import annotations

from prfaas.transport.receiver.admission import EndedTransfers


def test_a_peer_that_ends_many_transfers_pushes_out_its_own() -> None:
    remembered: EndedTransfers[bytes] = EndedTransfers(10)
    remembered.put("quiet", b"q", b"done")
    for number in range(100):
        remembered.put("busy", bytes([number]), b"error")
    assert remembered.get("quiet", b"q") == b"done"
    assert [number for number in range(100) if remembered.get("busy", bytes([number]))] == list(range(91, 100))
    assert remembered.get("quiet", b"x") is None and remembered.get("nobody", b"q") is None
