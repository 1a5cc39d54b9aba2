"""Transfers that parameters of requests ask for."""

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from prfaas import grants
from prfaas.connector.transfer_params import (
    EngineRequest,
    RequestedTransfer,
    direction_of,
    read_parameters,
    refusal_reason,
    uses_other_connector,
)
from prfaas.grants import Grant
from prfaas.types import AgentName, BlockHash, TransferId

GRANT = Grant(
    TransferId(bytes(16)), AgentName("a"), AgentName("b"), "h:1", BlockHash(bytes(16)), 100, 1 << 20, "t", 2e9
)
TEXT = grants.to_text(grants.sign(GRANT, b"key"))


def request(num_tokens: int, **parameters: Any) -> EngineRequest:
    return EngineRequest("r", num_tokens, parameters, lambda tenant: None)


def test_the_flags_are_those_of_vllms_proxies() -> None:
    assert direction_of({"do_remote_decode": True, "prfaas_grant": TEXT}) == "send"
    assert direction_of({"do_remote_prefill": True, "prfaas_grant": TEXT}) == "receive"
    assert direction_of({"do_remote_prefill": "yes", "prfaas_grant": TEXT}) is None
    assert direction_of({}) is None


@pytest.mark.parametrize(("flag", "brings_kv"), [("do_remote_decode", False), ("do_remote_prefill", True)])
def test_a_hand_over_without_a_grant_is_another_connectors(flag: str, brings_kv: bool) -> None:
    assert direction_of({flag: True}) is None
    assert uses_other_connector({flag: True}) == brings_kv
    assert not uses_other_connector({flag: True, "prfaas_grant": TEXT})


def test_the_prefill_leg_has_the_granted_tokens_and_the_decode_leg_one_more() -> None:
    for direction, length in (("send", 100), ("receive", 101)):
        leg = request(length, prfaas_grant=TEXT)
        asked = read_parameters(leg, direction)  # type: ignore[arg-type]
        assert isinstance(asked, RequestedTransfer) and asked.grant == GRANT
        assert refusal_reason(leg, asked) is None
        assert refusal_reason(request(length + 1, prfaas_grant=TEXT), asked) == "wrong_length"
        assert refusal_reason(replace(leg, excluded="rejected"), asked) == "rejected"


def _text(body: bytes) -> str:
    """Return the text of a grant around any bytes."""
    return grants.to_text(body + bytes(32))


OF_ANOTHER_TYPE = _text(msgpack.packb(vars(GRANT) | {"v": 1, "num_tokens": "100"}))


@pytest.mark.parametrize(
    "text",
    [
        *(None, 7, "", "?", "%%%", "AAAA", [[[]]], {"prfaas_grant": {"": None}}, TEXT[:-60], "A" * 5000),
        *(_text(b"\xc1" * 50), _text(b"\x91" * 2000), OF_ANOTHER_TYPE),
    ],
)
def test_a_grant_that_cannot_be_read_is_none(text: object) -> None:
    assert read_parameters(request(100, prfaas_grant=text), "send") is None
