"""Outcomes of ended transfers: how long they are remembered, and for whom."""

from __future__ import annotations

from prfaas.agent.transfer.receive import MAX_CANCELLED, MAX_OUTCOMES, OutcomeCache
from prfaas.grants import Grant
from prfaas.transport.protocol.messages import EndReason
from prfaas.transport.receiver.transfers import shorten
from prfaas.types import AgentName, BlockHash, TransferId

WHY, GAVE_UP = EndReason("incomplete", "why"), EndReason("cancelled", "no longer wanted")
UNTIL = 100.0


def _id(number: int) -> TransferId:
    return TransferId(number.to_bytes(16, "big"))


def _grant(number: int, *, source: str = "east") -> Grant:
    to = AgentName("west")
    return Grant(_id(number), AgentName(source), to, "127.0.0.1:1", BlockHash(bytes(16)), 96, 1 << 20, "", UNTIL)


def test_outcome_is_remembered_until_its_grant_expires() -> None:
    outcomes = OutcomeCache()
    outcomes.put(_id(1), WHY, until=UNTIL)
    outcomes.expire(UNTIL)
    assert outcomes.get(_grant(1)) == WHY and outcomes.get(_grant(2)) is None
    outcomes.expire(UNTIL + 1)
    assert outcomes.get(_grant(1)) is None


def test_oldest_outcomes_are_forgotten_beyond_the_limit() -> None:
    outcomes = OutcomeCache()
    for number in range(MAX_OUTCOMES + 2):
        outcomes.put(_id(number), WHY, until=UNTIL)
    outcomes.expire(0.0)
    assert [outcomes.get(_grant(number)) for number in range(3)] == [None, None, WHY]


def test_early_cancel_counts_only_from_the_granted_sender() -> None:
    outcomes = OutcomeCache()
    outcomes.put_cancelled("east", _id(1), GAVE_UP)
    assert outcomes.get(_grant(1)) == GAVE_UP
    assert outcomes.get(_grant(1, source="another")) is None
    for number in range(2 * MAX_CANCELLED):
        outcomes.put_cancelled("floods", _id(number), GAVE_UP)
    assert outcomes.get(_grant(1)) == GAVE_UP


def test_local_outcome_wins_over_early_cancel() -> None:
    outcomes = OutcomeCache()
    outcomes.put_cancelled("east", _id(1), GAVE_UP)
    outcomes.put(_id(1), WHY, until=UNTIL)
    assert outcomes.get(_grant(1)) == WHY


def test_long_messages_of_peers_are_shortened() -> None:
    outcomes, long = OutcomeCache(), EndReason("protocol", "\N{GREEK SMALL LETTER PI}" * 500)
    outcomes.put(_id(1), long, until=UNTIL)
    outcomes.put_cancelled("east", _id(2), long)
    kept = EndReason("protocol", shorten(long.message))
    assert len(kept.message) < 100 and outcomes.get(_grant(1)) == outcomes.get(_grant(2)) == kept
