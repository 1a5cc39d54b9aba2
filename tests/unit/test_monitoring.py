"""The Grafana dashboard and the alert rules ask for metrics that exist, by labels that they have, in PromQL that parses."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.reference_tables import metric_catalogue

promql = pytest.importorskip("promql_parser", reason="needs promql-parser (pip install promql-parser)")

ROOT = Path(__file__).resolve().parents[2]
BOARD = json.loads((ROOT / "deploy/grafana/prfaas.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())["groups"][0]["rules"]
# Of its own a scrape adds these two, and a histogram's buckets have their bound.
SCRAPED = {"job", "instance"}


def _known() -> dict[str, set[str]]:
    """The labels of every series."""
    series = {}
    for item in metric_catalogue():
        names = (
            [item.name] if item.kind != "histogram" else [f"{item.name}_{end}" for end in ("bucket", "sum", "count")]
        )
        for name in names:
            series[name] = {*item.labels, *SCRAPED, *(("le",) if name.endswith("_bucket") else ())}
    return series


KNOWN = _known()


def asked() -> list[str]:
    of_board = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    return [expr.replace("$__rate_interval", "5m") for expr in of_board] + [rule["expr"] for rule in RULES]


def parts(node: Any) -> Iterator[Any]:
    """A parsed expression and all that it is made of."""
    yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        child = getattr(node, name, None)
        if child is not None:
            yield from parts(child)
    for child in getattr(node, "args", ()):
        yield from parts(child)


def series_of(expr: str) -> dict[str, set[str]]:
    """Every series that an expression selects, with the labels that it is selected by."""
    selectors = [part for part in parts(promql.parse(expr)) if isinstance(part, promql.VectorSelector)]
    return {selector.name: {matcher.name for matcher in selector.matchers.matchers} for selector in selectors}


@pytest.mark.parametrize("expr", asked())
def test_a_query_asks_for_series_and_labels_that_exist(expr: str) -> None:
    found = series_of(expr)
    assert found or "vector" in expr
    for name, labels in found.items():
        assert name in KNOWN, expr
        assert labels <= KNOWN[name], expr
    grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expr) for label in group.split(",")}
    assert grouped <= set().union(*(KNOWN[name] for name in found)), expr


def test_no_legend_names_a_label_that_its_query_drops() -> None:
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named <= set(re.findall(r"\w+", target["expr"])), target


@pytest.mark.parametrize("arguments", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")])
def test_promtool_takes_the_rules_and_they_fire_when_they_should(arguments: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool: apt install prometheus")
    ran = subprocess.run(
        [promtool, *arguments], cwd=ROOT / "deploy/prometheus", capture_output=True, text=True, timeout=150, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
