"""Records of transfers: acknowledgements in bounded memory, and reads from another thread."""

from __future__ import annotations

from typing import Any

from prfaas.agent.transfer.log import TransferLog, TransferRecord
from prfaas.types import TransferId


def _record(kind: type[TransferRecord] = TransferRecord) -> TransferRecord:
    return kind(TransferId(bytes(16)), "out", "west", num_tokens=16, payload_bytes=1 << 30, attention_bytes=1 << 30)


def test_acknowledgements_before_the_end_of_prefill_count_in_any_order() -> None:
    record = _record()
    for time_ns in range(100, 1100):
        record.acknowledge(time_ns, 10 * time_ns)
    record.end_forward(1050)
    assert record.acknowledged_before_prefill_ended_bytes == 10_500
    record.acknowledge(1200, 12_000)
    record.end_forward(1300)
    record.acknowledge(1400, 14_000)
    assert (record.acknowledged_before_prefill_ended_bytes, record.acknowledged_bytes) == (12_000, 14_000)


def test_ended_record_keeps_no_acknowledgements() -> None:
    log, record = TransferLog(), _record()
    record.acknowledge(1, 1)
    log.end(log.begin(record), "cancelled")
    record.acknowledge(2, 2)
    record.end_forward(3)
    assert (len(record.acknowledgements), record.acknowledgements.maxlen) == (0, 0)
    assert record.acknowledged_before_prefill_ended_bytes == 0


def test_transfers_may_begin_during_a_listing() -> None:
    log = TransferLog()

    class Meanwhile(TransferRecord):
        def to_dict(self) -> dict[str, Any]:
            log.begin(_record())
            return super().to_dict()

    log.begin(_record(Meanwhile))
    assert len(log.to_list()) == 1
    assert len(log.to_list()) == 2
