"""What a receiver says where no connection takes it at once."""

from __future__ import annotations

import contextlib
import socket

import pytest

from prfaas.transport.net.connection import Connection
from prfaas.transport.protocol.messages import Ending, Have, encode_ending, encode_have
from prfaas.transport.protocol.wire import FrameType
from prfaas.transport.ranges import Ranges
from prfaas.transport.receiver.transfer import MAX_UNSAID, Answer, Answers, have_later
from tests.integration.transport.ends import fill_up
from tests.support.waiting import PATIENCE_SECONDS

ID = bytes(range(16))
ERROR = encode_ending(FrameType.ERROR, ID, Ending("cancelled", "no longer wanted"))


@pytest.mark.parametrize("is_ended", [False, True])
def test_what_nobody_took_is_said_later_and_a_have_takes_no_endings_place(is_ended: bool) -> None:
    ours, theirs = socket.socketpair()
    connection, peer = Connection(ours, state="receiving"), Connection(theirs, state="sending")
    peer.set_read_timeout(PATIENCE_SECONDS)
    answers = Answers(lambda transfer_id: Answer(transfer_id, [connection], encode_have(ID, Have(Ranges(), ()))))
    with contextlib.closing(connection), contextlib.closing(peer):
        num_bytes = fill_up(ours)
        if is_ended:
            answers.say(Answer(ID, [connection], ERROR, is_ending=True))
        answers.say(have_later(ID))
        answers.say_again()
        peer.read_into([memoryview(bytearray(num_bytes))])
        answers.say_again()
        assert peer.read_header().type is (FrameType.ERROR if is_ended else FrameType.HAVE)


def test_so_many_answers_wait_and_of_more_the_oldest_are_not_said() -> None:
    asked: list[bytes] = []
    answers = Answers(asked.append)
    transfers = [number.to_bytes(16, "big") for number in range(3 * MAX_UNSAID)]
    for transfer_id in transfers:
        answers.say_later(have_later(transfer_id))
    answers.say_again()
    assert asked == transfers[-MAX_UNSAID:]
