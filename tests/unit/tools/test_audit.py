"""Reports of pip-audit, as `make audit` evaluates them."""

import json

from tools.audit import UNREACHABLE, parse_report, unanswered_vulnerabilities

VULNERABLE = {
    "name": "jinja2",
    "version": "2.4.1",
    "vulns": [{"id": "PYSEC-2014-8", "aliases": ["CVE-2014-0012"], "fix_versions": ["2.7.2"]}],
}
SOUND = {"name": "attrs", "version": "25.1.0", "vulns": []}
UNKNOWN = {"name": "attrs", "skip_reason": f"{UNREACHABLE} and could not be audited: attrs (25.1.0)"}


def test_source_that_knows_no_package_counts_as_unreachable() -> None:
    for report in ("", "no JSON", "{}", json.dumps({"dependencies": [UNKNOWN, UNKNOWN]})):
        assert parse_report(report) is None


def test_packages_unknown_to_the_source_are_left_out() -> None:
    assert parse_report(json.dumps({"dependencies": [SOUND, UNKNOWN, VULNERABLE]})) == [SOUND, VULNERABLE]


def test_vulnerability_is_reported_until_its_id_or_alias_has_an_answer() -> None:
    assert unanswered_vulnerabilities([SOUND, VULNERABLE]) == ["jinja2 2.4.1: PYSEC-2014-8, fixed in 2.7.2"]
    for name in ("PYSEC-2014-8", "CVE-2014-0012"):
        assert unanswered_vulnerabilities([SOUND, VULNERABLE], {name: "it is only used by tests"}) == []
