"""The calls of an earlier version are still what they were: managers, agents and routers of both meet in an upgrade.

`tests/data/manager-calls-before.json` is how commit 65b4dc8 described its messages and calls.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from prfaas.rpc.generated import manager_pb2 as pb

BEFORE: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "manager-calls-before.json").read_text()
)
RESERVED = {"prfaas.v1.WatchStateRequest": {1}}  # Numbers of removed fields, which no other field may use.


def _messages(described: Iterable[Descriptor]) -> Iterator[Descriptor]:
    for message in described:
        yield message
        yield from _messages(message.nested_types)


MESSAGES = {message.full_name: message for message in _messages(pb.DESCRIPTOR.message_types_by_name.values())}


@pytest.mark.parametrize("name", sorted(BEFORE["messages"]))
def test_earlier_fields_keep_number_and_type(name: str) -> None:
    found = {field.number: [field.number, field.type, field.is_repeated] for field in MESSAGES[name].fields}
    for field, before in BEFORE["messages"][name].items():
        if before[0] in RESERVED.get(name, ()):
            assert before[0] not in found, f"{field} has left, and its number is taken"
        else:
            assert found[before[0]] == before, field


def test_earlier_calls_keep_their_messages() -> None:
    for name, calls in BEFORE["services"].items():
        service = pb.DESCRIPTOR.services_by_name[name.rpartition(".")[2]]
        found = {
            method.name: [
                method.input_type.full_name,
                method.output_type.full_name,
                method.client_streaming,
                method.server_streaming,
            ]
            for method in service.methods
        }
        assert calls.items() <= found.items()
