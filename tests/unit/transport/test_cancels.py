"""The CANCELs of a link: how many of them are kept."""

from __future__ import annotations

from prfaas.transport.sender.outbound_transfer import MAX_CANCELS, PendingCancels


def test_what_waits_for_a_connection_after_a_loss_is_bounded_and_the_oldest_go() -> None:
    cancels, transfers = PendingCancels(), [number.to_bytes(16, "big") for number in range(2 * MAX_CANCELS)]
    for transfer_id in transfers[: MAX_CANCELS + 10]:
        cancels.put(transfer_id, b"cancel", deadline=60.0)
        cancels.next_frame()
    for transfer_id in transfers[MAX_CANCELS + 10 :]:
        cancels.put(transfer_id, b"cancel", deadline=60.0)
    cancels.connection_lost()
    assert list(cancels.unsaid) == transfers[MAX_CANCELS:]
