"""The table of what is tested of operations: no promise without its row, no row without its test, no test without its row."""

from __future__ import annotations

import re

import pytest

from tools.reference_tables import ROOT

PAGE = ROOT / "docs/operations-tests.md"
ROWS = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
TEST = re.compile(r"`(tests/[\w/]+\.py)`|`make bench AREA=(\w+)`")
# What the project promises to whoever runs it, each by words that its row has.
PROMISES = (
    "dashboard: every panel",
    "what-if panel",
    "every metric documented",
    "Grafana dashboard and alert rules",
    "one trace of a request over router, manager and agents",
    "time to the first token by queue, prefill, wire, load",
    "the command `prfaas`: status, links, top, explain, drain, flip, pool",
    "tables on a terminal, JSON otherwise, completion",
    "`prfaas doctor`",
    "`prfaas config check`",
    "an annotated file per component",
    "systemd units",
    "container and compose files",
    "Kubernetes manifests",
    "Redis: embedded, single, Sentinel, Redis Cluster",
    "rolling restart under load",
    "upgrade from an earlier version",
    "threat model in one page",
    "mutual TLS: plain, wrong-CA, expired, revoked",
    "with the defaults nothing listens beyond loopback",
    "`prfaas certs`",
    "certificates are reloaded",
    "per-tenant salts",
    "API keys with quotas",
    "only operators drain and flip, and it is written down",
    "nothing makes code of data",
    "what listens survives noise",
    "dependency audit",
    "bill of materials",
    "the core needs neither torch nor vLLM",
    "the documentation builds without warnings",
    "every command of the documentation",
    "every path and metric named in the documentation exists",
    "a newcomer with the README alone",
    "two datacenters on one machine",
)
# Folders whose every test is of operations.
FOLDERS = ("security", "dashboard", "console", "deploy", "docs", "tracing")


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_has_its_row(promise: str) -> None:
    assert sum(promise in row[0] for row in ROWS) == 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].removeprefix("| ")[:60])
def test_a_row_names_tests_that_are_there(row: list[str]) -> None:
    found = TEST.findall(row[1])
    assert found
    for test, area in found:
        path = ROOT / (test or f"benchmarks/{area}/__main__.py")
        assert path.exists() and (area or "def test_" in path.read_text()), path


def test_a_test_of_operations_has_its_row() -> None:
    named = {test for row in ROWS for test, _ in TEST.findall(row[1])}
    there = {path for folder in FOLDERS for path in ROOT.glob(f"tests/integration/{folder}/test_*.py")}
    there |= {path for path in ROOT.glob("tests/integration/manager/test_*.py") if "redis" in path.stem}
    assert {str(path.relative_to(ROOT)) for path in there} <= named
