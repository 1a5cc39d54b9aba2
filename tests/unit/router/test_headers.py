"""Headers of clients, whatever bytes they carry."""

from __future__ import annotations

import pytest

from prfaas.router.http.admission import AdmissionRefused, Quota, Quotas, RequestAdmission, Tenants
from prfaas.router.openai.headers import MAX_SESSION_CHARS, request_id_of, session_of

NO_TEXT = b"caf\xe9".decode("utf-8", "surrogateescape")  # as a server gives bytes that are no UTF-8


def test_a_session_keeps_its_name_when_it_is_short_plain_text() -> None:
    assert session_of("chat-1 of Ann") == "chat-1 of Ann"
    assert session_of("") == session_of(None) == ""


@pytest.mark.parametrize("given", ["s" * (MAX_SESSION_CHARS + 1), "s" * 8000, "a\tb", "é", NO_TEXT])
def test_any_other_session_is_named_by_its_digest(given: str) -> None:
    assert session_of(given) == session_of(given) != session_of(given + ".")
    assert len(session_of(given)) == 32 and session_of(given).isalnum()


def test_an_id_that_logs_cannot_carry_is_replaced() -> None:
    assert request_id_of("a-1:b.c_D") == "a-1:b.c_D"
    for given in (None, "", "x" * 129, "a b", NO_TEXT):
        assert request_id_of(given) != given


def test_a_key_of_any_bytes_is_told_that_it_is_none() -> None:
    quotas = Quotas({}, Quota(), lambda: 0.0)
    admission = RequestAdmission({"key": "a"}, max_requests=1, quotas=quotas, tenants=Tenants({}))
    with pytest.raises(AdmissionRefused) as refused:
        admission.admit(f"Bearer {NO_TEXT}")
    assert refused.value.status == 401
