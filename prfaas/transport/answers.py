"""What the receiving end says of its transfers: at once where a connection takes it, at a later tick where none does."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple

from prfaas.transport import messages
from prfaas.transport.connection import Connection
from prfaas.transport.messages import Ending
from prfaas.transport.wire import FrameType
from prfaas.types import FailureReason

MAX_UNSAID = 4096  # answers that no connection took at once
MAX_REMEMBERED_MESSAGE_BYTES = 100  # of why a transfer ended, which is remembered


class Answer(NamedTuple):
    """A frame for a transfer's sender, on any of these connections; an ending on all of them, as any may be dead already.

    None stands for a HAVE, made when it is said.
    """

    transfer_id: bytes
    connections: list[Connection]
    frame: bytes | None
    is_ending: bool = False


def have_later(transfer_id: bytes) -> Answer:
    """The HAVE of a transfer as it will be when it is said."""
    return Answer(transfer_id, [], None)


def error_of(transfer_id: bytes, reason: FailureReason, message: str) -> bytes:
    """The frame that says how a transfer ended without its data."""
    return messages.encode_ending(FrameType.ERROR, transfer_id, Ending(reason, shortened(message)))


def shortened(message: str) -> str:
    """So much of it as is remembered."""
    return message.encode(errors="replace")[:MAX_REMEMBERED_MESSAGE_BYTES].decode(errors="ignore")


class Answers:
    """All answers of a receiver, which any thread may say."""

    def __init__(self, make_have: Callable[[bytes], Answer | None]) -> None:
        """`make_have` makes a transfer's HAVE, without a frame where no connection takes one; None: the transfer has ended."""
        self._make_have = make_have
        self._lock = threading.Lock()
        self._unsaid: OrderedDict[bytes, Answer] = OrderedDict()  # by transfer

    def say(self, said: Answer) -> None:
        """Write a frame on the first connection that takes it at once, an ending on each; where none does, at a later tick."""
        answer = said if said.frame is not None else self._make_have(said.transfer_id)
        if answer is None:
            return
        outcomes = []
        for connection in answer.connections:
            outcomes.append("later" if answer.frame is None else say_at_once(connection, answer.frame))
            if outcomes[-1] == "said" and not answer.is_ending:
                break
        if "said" not in outcomes and "later" in outcomes:  # a sender that has lost all connections asks again
            self.say_later(said if said.is_ending else have_later(said.transfer_id))

    def say_later(self, answer: Answer) -> None:
        """At the next `say_again`; the latest of each transfer alone, which after an ending no HAVE is."""
        with self._lock:
            before = self._unsaid.get(answer.transfer_id)
            self._unsaid[answer.transfer_id] = before if before is not None and before.is_ending else answer
            if len(self._unsaid) > MAX_UNSAID:
                self._unsaid.popitem(last=False)

    def say_again(self) -> None:
        """Try what nobody took."""
        with self._lock:
            unsaid, self._unsaid = self._unsaid, OrderedDict()
        for answer in unsaid.values():
            self.say(answer)


def say(connection: Connection, frame: bytes) -> bool:
    """Write a frame; whether the connection took it."""
    try:
        connection.write(frame)
        return True
    except OSError:
        return False


def say_at_once(connection: Connection, frame: bytes) -> Literal["said", "later", "lost"]:
    """Write a frame on a connection that takes it without being waited for; one that is lost ends."""
    try:
        return "said" if connection.write_at_once(frame) else "later"
    except OSError:
        return "lost"
