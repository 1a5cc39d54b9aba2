"""Who may see the router's own pages."""

from __future__ import annotations

import pytest

from prfaas.router.http.admission import OperatorKeys


@pytest.mark.parametrize(
    ("keys", "clients_are_known", "seen_by"),
    [
        ((), False, {None, "", "o", "Bearer ", "Bearer o", "bearer o", "Bearer p", "Bearer wrong"}),
        ((), True, set()),
        (("o",), False, {"Bearer o", "bearer o"}),
        (("o", "p"), True, {"Bearer o", "Bearer p", "bearer o"}),
    ],
)
def test_operators_pages_are_open_only_where_nobody_needs_a_key(
    keys: tuple[str, ...], clients_are_known: bool, seen_by: set[str | None]
) -> None:
    operators = OperatorKeys(keys, clients_are_known=clients_are_known)
    given = (None, "", "o", "Bearer ", "Bearer o", "bearer o", "Bearer p", "Bearer wrong")
    assert {its for its in given if operators.may_see(its)} == seen_by
