"""Grants: who may send what to whom, and until when."""

import hashlib
import hmac
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import GrantError
from prfaas.grants import MAX_GRANT_BYTES, Grant, GrantEnd, derive_key, from_text, sign, to_text, verify, verify_end
from prfaas.types import AgentName, BlockHash, TransferId

KEY = derive_key(b"s" * 32, "grant")
GRANT = Grant(
    transfer_id=TransferId(bytes(range(16))),
    source=AgentName("east-1"),
    destination=AgentName("west-1"),
    destination_address="10.0.0.2:7400",
    prompt_hash=BlockHash(b"h" * 16),
    num_tokens=1024,
    max_bytes=1 << 30,
    tenant="",
    expires_at=1000.0,
)


_OF_A_TRANSFER = {name: item for name, item in vars(GRANT).items() if name not in ("kind", "prefix_hash")}


def _reason(token: bytes, *, now: float = 0.0) -> str:
    with pytest.raises(GrantError) as caught:
        verify(token, KEY, kind="transfer", now=now)
    return caught.value.reason


def test_a_signed_grant_comes_back_whole() -> None:
    assert verify(from_text(to_text(sign(GRANT, KEY))), KEY, kind="transfer", now=999.0) == GRANT


def test_a_signed_copy_grant_comes_back_whole() -> None:
    item = replace(GRANT, kind="copy", prefix_hash=BlockHash(b"p" * 16))
    assert verify(sign(item, KEY), KEY, kind="copy", now=999.0) == item


def test_a_transfer_is_granted_as_agents_of_earlier_versions_take_it() -> None:
    assert msgpack.unpackb(sign(GRANT, KEY)[:-32]) == {"v": 1, **_OF_A_TRANSFER}


@pytest.mark.parametrize(("end", "message"), [("source", "lets east-1 send"), ("destination", "lets west-1 receive")])
@pytest.mark.parametrize(
    ("agents", "transfer_id"),
    [
        ({"source": "west-1", "destination": "east-1"}, GRANT.transfer_id),
        ({"source": "east-1", "destination": "west-1"}, TransferId(bytes(16))),
    ],
)
def test_a_grant_of_another_transfer_or_other_agents_is_refused_at_both_ends(
    end: GrantEnd, message: str, agents: dict[GrantEnd, str], transfer_id: TransferId
) -> None:
    with pytest.raises(GrantError, match=message) as refused:
        _verified(end, agents[end], transfer_id)
    assert refused.value.reason == "not_ours"


def test_the_agents_that_a_grant_names_may_have_its_transfer() -> None:
    assert _verified("source", GRANT.source, GRANT.transfer_id) == GRANT
    assert _verified("destination", GRANT.destination, GRANT.transfer_id) == GRANT


def _verified(end: GrantEnd, agent: str, transfer_id: TransferId) -> Grant:
    item = sign(GRANT, KEY)
    return verify_end(item, KEY, kind="transfer", end=end, agent=AgentName(agent), transfer_id=transfer_id, now=0.0)


def test_an_expired_grant_is_refused() -> None:
    assert _reason(sign(GRANT, KEY), now=1000.5) == "expired"


def test_a_grant_of_another_kind_is_refused() -> None:
    assert _reason(sign(replace(GRANT, kind="copy"), KEY)) == "other_use"


def test_a_grant_of_another_secret_or_purpose_is_refused() -> None:
    assert _reason(sign(GRANT, derive_key(b"t" * 32, "grant"))) == "forged"
    assert _reason(sign(GRANT, derive_key(b"s" * 32, "wire"))) == "forged"


@given(st.integers(0, len(sign(GRANT, KEY)) * 8 - 1))
def test_any_flipped_bit_is_refused(bit: int) -> None:
    token = bytearray(sign(GRANT, KEY))
    token[bit // 8] ^= 1 << bit % 8
    assert _reason(bytes(token)) == "forged"


@given(st.binary(max_size=MAX_GRANT_BYTES + 10))
def test_noise_is_refused(noise: bytes) -> None:
    assert _reason(noise) in ("malformed", "forged")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"v": 3, **vars(GRANT)}, "version"),
        ({"v": 1, **vars(GRANT)}, "malformed"),
        ({"v": 2, **_OF_A_TRANSFER}, "malformed"),
        ({"v": 1, "transfer_id": b"short"}, "malformed"),
        ([1, 2], "version"),
    ],
)
def test_a_signed_grant_of_another_form_is_refused(fields: object, reason: str) -> None:
    body = msgpack.packb(fields)
    assert _reason(body + hmac.digest(KEY, body, hashlib.sha256)) == reason


def test_a_field_of_another_type_is_refused() -> None:
    assert _reason(sign(replace(GRANT, num_tokens="many"), KEY)) == "malformed"  # type: ignore[arg-type]


def test_text_that_is_no_base64_is_refused() -> None:
    with pytest.raises(GrantError, match="base64"):
        from_text("a")
