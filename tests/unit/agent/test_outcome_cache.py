"""How transfers have ended: what is remembered of them, of whom, and for how long."""

from __future__ import annotations

from prfaas.agent.transfer.receive import MAX_CANCELLED, MAX_OUTCOMES, OutcomeCache
from prfaas.grants import Grant
from prfaas.transport.protocol.messages import Ending
from prfaas.transport.receiver.transfers import shorten
from prfaas.types import AgentName, BlockHash, TransferId

WHY, GAVE_UP = Ending("incomplete", "why"), Ending("cancelled", "no longer wanted")
UNTIL = 100.0


def _id(number: int) -> TransferId:
    return TransferId(number.to_bytes(16, "big"))


def _grant(number: int, *, source: str = "east") -> Grant:
    to = AgentName("west")
    return Grant(_id(number), AgentName(source), to, "127.0.0.1:1", BlockHash(bytes(16)), 96, 1 << 20, "", UNTIL)


def test_outcome_is_remembered_until_its_grant_expires() -> None:
    endings = OutcomeCache()
    endings.put(_id(1), WHY, until=UNTIL)
    endings.expire(UNTIL)
    assert endings.get(_grant(1)) == WHY and endings.get(_grant(2)) is None
    endings.expire(UNTIL + 1)
    assert endings.get(_grant(1)) is None


def test_oldest_outcomes_are_forgotten_beyond_the_limit() -> None:
    endings = OutcomeCache()
    for number in range(MAX_OUTCOMES + 2):
        endings.put(_id(number), WHY, until=UNTIL)
    endings.expire(0.0)
    assert [endings.get(_grant(number)) for number in range(3)] == [None, None, WHY]


def test_early_cancel_counts_only_from_the_granted_sender() -> None:
    endings = OutcomeCache()
    endings.put_cancelled("east", _id(1), GAVE_UP)
    assert endings.get(_grant(1)) == GAVE_UP
    assert endings.get(_grant(1, source="another")) is None
    for number in range(2 * MAX_CANCELLED):
        endings.put_cancelled("floods", _id(number), GAVE_UP)
    assert endings.get(_grant(1)) == GAVE_UP


def test_local_outcome_wins_over_early_cancel() -> None:
    endings = OutcomeCache()
    endings.put_cancelled("east", _id(1), GAVE_UP)
    endings.put(_id(1), WHY, until=UNTIL)
    assert endings.get(_grant(1)) == WHY


def test_long_messages_of_peers_are_shortened() -> None:
    endings, long = OutcomeCache(), Ending("protocol", "\N{GREEK SMALL LETTER PI}" * 500)
    endings.put(_id(1), long, until=UNTIL)
    endings.put_cancelled("east", _id(2), long)
    kept = Ending("protocol", shorten(long.message))
    assert len(kept.message) < 100 and endings.get(_grant(1)) == endings.get(_grant(2)) == kept
