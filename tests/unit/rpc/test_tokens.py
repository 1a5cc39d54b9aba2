from __future__ import annotations

from prfaas.rpc.tokens import NAME_KEY, TOKEN_KEY, caller, credentials

SECRET = bytes(range(32))


def test_a_name_is_proved_by_the_secret() -> None:
    assert caller(dict(credentials("n1", SECRET)), SECRET) == "n1"


def test_a_name_without_proof_or_with_anothers_is_nobody() -> None:
    proof = dict(credentials("n1", SECRET))
    assert caller(proof | {NAME_KEY: "n2"}, SECRET) is None
    assert caller({NAME_KEY: "n1"}, SECRET) is None
    assert caller(proof | {TOKEN_KEY: "ü"}, SECRET) is None
    assert caller(dict(credentials("n1", bytes(32))), SECRET) is None
