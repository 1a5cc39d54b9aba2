"""Clients' headers, whatever bytes they carry, and the paths that clients may use."""

import pytest

from prfaas.router.http.admission import AdmissionRefused, RequestAdmission, Tenants
from prfaas.router.http.proxy import PathRefused, check_path
from prfaas.router.openai.headers import MAX_SESSION_CHARS, request_id_of, session_of

NOT_UTF8 = b"caf\xe9".decode("utf-8", "surrogateescape")  # In the form in which a server passes such bytes.


def test_short_plain_session_name_is_kept() -> None:
    assert session_of("chat-1 of Ann") == "chat-1 of Ann"
    assert session_of("") == session_of(None) == ""


@pytest.mark.parametrize("header", ["s" * (MAX_SESSION_CHARS + 1), "s" * 8000, "a\tb", "é", NOT_UTF8])
def test_other_session_names_are_replaced_by_a_digest(header: str) -> None:
    assert session_of(header) == session_of(header) != session_of(header + ".")
    assert len(session_of(header)) == 32 and session_of(header).isalnum()


def test_request_id_that_logs_cannot_carry_is_replaced() -> None:
    assert request_id_of("a-1:b.c_D") == "a-1:b.c_D"
    for header in (None, "", "x" * 129, "a b", NOT_UTF8):
        assert request_id_of(header) != header


def test_key_that_is_not_utf8_is_refused_as_an_unknown_key() -> None:
    admission = RequestAdmission({"key": "a"}, max_requests=1, tenants=Tenants({}))
    with pytest.raises(AdmissionRefused) as refused:
        admission.admit(f"Bearer {NOT_UTF8}")
    assert refused.value.status == 401


@pytest.mark.parametrize("path", ["/v1/models", "/v1/embeddings", "/v1/responses/..x/cancel", "/v1/a...b", "/v1/"])
def test_paths_for_clients_are_allowed(path: str) -> None:
    check_path(path)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/../sleep", "/v1/x/../../sleep", "/v1/./models", "/v1\\..\\sleep", "/v1//../x", ".."),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter/", "//v1//load_lora_adapter"),
    ],
)
def test_paths_with_dots_and_paths_that_change_the_engine_are_refused(path: str) -> None:
    with pytest.raises(PathRefused):
        check_path(path)
