"""Audit of the installed packages (`make audit`). Fails for each known vulnerability that has no entry in `ANSWERS`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
SOURCES = ("pypi", "osv")
TIMEOUT_SECONDS = 240.0
UNREACHABLE = "Dependency not found on PyPI"  # Reason of every package if the index serves no advisories.
# Advisory ids, each with the reason why it does not concern this project.
ANSWERS: dict[str, str] = {}


def audit(source: str) -> list[dict[str, Any]] | None:
    """Return the dependencies with their vulnerabilities; None if the source of advisories is unreachable."""
    command = [
        str(BIN / "pip-audit"),
        "--local",
        "--progress-spinner=off",
        "--format=json",
        f"--vulnerability-service={source}",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        return parse_report(done.stdout)
    except subprocess.TimeoutExpired:
        return None


def parse_report(report: str) -> list[dict[str, Any]] | None:
    """Return the dependencies in pip-audit's report that the source knows; None if it knows none."""
    try:
        found: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, LookupError):
        return None
    return [package for package in found if UNREACHABLE not in package.get("skip_reason", "")] or None


def unanswered_vulnerabilities(dependencies: list[dict[str, Any]], answers: Mapping[str, str] = ANSWERS) -> list[str]:
    """Return a line for each vulnerability without an answer."""
    return [
        f"{package['name']} {package['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'no version'}"
        for package in dependencies
        for found in package.get("vulns", [])
        if not {found["id"], *found.get("aliases", [])} & set(answers)
    ]


def main() -> int:
    """Return 1 if a vulnerability has no answer."""
    for source in SOURCES:
        dependencies = audit(source)
        if dependencies is None:
            print(f"skipped: the advisories of {source} are unreachable")
            continue
        lines = unanswered_vulnerabilities(dependencies)
        print("\n".join(lines) or f"{source}: no vulnerabilities known in {len(dependencies)} packages")
        return 1 if lines else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
