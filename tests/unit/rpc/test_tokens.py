from prfaas.rpc.tokens import NAME_KEY, TOKEN_KEY, caller, credentials

SECRET = bytes(range(32))


def test_token_proves_the_name() -> None:
    assert caller(dict(credentials("n1", SECRET)), SECRET) == "n1"


def test_name_without_its_own_token_is_refused() -> None:
    proof = dict(credentials("n1", SECRET))
    assert caller(proof | {NAME_KEY: "n2"}, SECRET) is None
    assert caller({NAME_KEY: "n1"}, SECRET) is None
    assert caller(proof | {TOKEN_KEY: "ü"}, SECRET) is None
    assert caller(dict(credentials("n1", bytes(32))), SECRET) is None
