"""Paths that clients may ask an engine for."""

from __future__ import annotations

import pytest

from prfaas.router.http.proxy import PathRefused, check_path


@pytest.mark.parametrize("path", ["/v1/models", "/v1/embeddings", "/v1/responses/..x/cancel", "/v1/a...b", "/v1/"])
def test_paths_of_a_clients_own_requests_are_open(path: str) -> None:
    check_path(path)


@pytest.mark.parametrize(
    "path", ["/v1/../sleep", "/v1/x/../../sleep", "/v1/./models", "/v1\\..\\sleep", "/v1//../x", ".."]
)
def test_a_path_that_leads_out_of_where_it_stands_is_refused(path: str) -> None:
    with pytest.raises(PathRefused, match=r"no \. or \.\."):
        check_path(path)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter/", "//v1//load_lora_adapter"])
def test_a_path_that_changes_the_engine_is_refused(path: str) -> None:
    with pytest.raises(PathRefused, match="operators"):
        check_path(path)
