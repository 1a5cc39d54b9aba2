from __future__ import annotations

from prfaas.rpc.tokens import TOKEN_KEY, caller, credentials

SECRET = bytes(range(32))


def test_a_name_is_proved_by_the_secret() -> None:
    assert caller(credentials("n1", SECRET), SECRET) == "n1"


def test_a_name_without_proof_or_with_anothers_is_nobody() -> None:
    (name, _), token = credentials("n1", SECRET)
    assert caller(((name, "n2"), token), SECRET) is None
    assert caller(((name, "n1"),), SECRET) is None
    assert caller(((name, "n1"), (TOKEN_KEY, "ü")), SECRET) is None
    assert caller(credentials("n1", bytes(32)), SECRET) is None
