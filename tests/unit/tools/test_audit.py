"""What pip-audit reports, as `make audit` takes it."""

from __future__ import annotations

import json

from tools.audit import UNREACHABLE, looked_at, unanswered

WEAK = {
    "name": "jinja2",
    "version": "2.4.1",
    "vulns": [{"id": "PYSEC-2014-8", "aliases": ["CVE-2014-0012"], "fix_versions": ["2.7.2"]}],
}
SOUND = {"name": "attrs", "version": "25.1.0", "vulns": []}
UNKNOWN = {"name": "attrs", "skip_reason": f"{UNREACHABLE} and could not be audited: attrs (25.1.0)"}


def test_a_source_that_knows_of_no_package_is_out_of_reach() -> None:
    for report in ("", "no JSON", "{}", json.dumps({"dependencies": [UNKNOWN, UNKNOWN]})):
        assert looked_at(report) is None


def test_packages_of_our_own_leave_the_others_looked_at() -> None:
    assert looked_at(json.dumps({"dependencies": [SOUND, UNKNOWN, WEAK]})) == [SOUND, WEAK]


def test_a_finding_is_named_until_it_has_an_answer_by_either_name() -> None:
    assert unanswered([SOUND, WEAK]) == ["jinja2 2.4.1: PYSEC-2014-8, mended in 2.7.2"]
    for name in ("PYSEC-2014-8", "CVE-2014-0012"):
        assert unanswered([SOUND, WEAK], {name: "it is only used by tests"}) == []
