"""Messages between an engine and its agent."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.agent.engine.protocol import (
    MAX_MESSAGE_BYTES,
    Attach,
    Attached,
    Cancel,
    Forget,
    Forgotten,
    Message,
    MessageBuffer,
    Receive,
    ReceiveReady,
    Refused,
    Release,
    Send,
    SendOpened,
    TransferDone,
    TransferFailed,
    decode,
    encode,
)
from prfaas.errors import RemoteProtocolError
from prfaas.types import BlockHash, GroupBlocks, TransferId

ID = TransferId(b"i" * 16)
HASH = BlockHash(b"h" * 16)
GROUPS = (GroupBlocks(0, 0, (HASH, HASH), HASH), GroupBlocks(1, 3, ()))
MESSAGES: list[Message] = [
    Attach(1, "west/0", "worker", 0, {"version": 1}),
    Attach(1, "west/0", "scheduler", 0, None),
    Attached("west", 10, 4096, 4096),
    Refused("no"),
    Send(ID, b"grant", GROUPS),
    Send(ID, b"grant", GROUPS, "00-trace", -(2**63)),
    Send(ID, b"grant", GROUPS, priority=2),
    SendOpened(ID, 3, [[[1, -1]]]),
    Receive(ID, b"grant", HASH, GROUPS),
    ReceiveReady(ID, [[[1, 2]]], [[[5, 6]]]),
    Release(ID),
    Cancel(ID),
    Forget(ID, "tiny"),
    Forgotten(ID),
    TransferDone(ID),
    TransferFailed(ID, "deadline", "late"),
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.lists(st.integers(1, 40), min_size=1))
def test_messages_survive_any_split_of_the_stream(messages: list[Message], cuts: list[int]) -> None:
    stream = b"".join(map(encode, messages))
    buffer, got, at, step = MessageBuffer(), [], 0, 0
    while at < len(stream):
        size = cuts[step % len(cuts)]
        got += buffer.feed(stream[at : at + size])
        at, step = at + size, step + 1
    assert got == messages


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_remote_protocol_errors(noise: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(noise)


@pytest.mark.parametrize(
    "fields",
    [
        ["Release"],
        ["Release", ID, 1],
        ["Release", 5],
        ["Unknown", ID],
        ["TransferFailed", ID, "no such reason", ""],
        ["Attach", "1", "x", "worker", 0, None],
        ["Send", ID, b"g", [[0, 0, b"short", HASH]], "", 0],
        ["Send", ID, b"g", [[-1, 0, HASH, HASH]], "", 0],
        ["Send", ID, b"g", [[0, 0, HASH]], "", 0],
        ["Send", ID, b"g", [], "", "high"],
    ],
)
def test_message_with_a_wrong_field_is_refused(fields: list[object]) -> None:
    with pytest.raises(RemoteProtocolError, match="not a message"):
        decode(msgpack.packb(fields))


def test_message_beyond_the_length_limit_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="the limit is"):
        MessageBuffer().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))
