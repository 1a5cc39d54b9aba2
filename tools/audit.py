"""Known weaknesses in what is installed: each is answered here, or `make audit` fails; a source out of reach is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
SOURCES = ("pypi", "osv")
SECONDS = 240.0
UNREACHABLE = "Dependency not found on PyPI"  # what pip-audit says of every one where PyPI's advisories are not served
# Advisory id: why it does not concern us.
ANSWERS: dict[str, str] = {}


def audit(source: str) -> list[dict[str, Any]] | None:
    """The dependencies with what is known of them; None where the source of advisories cannot be reached."""
    line = [
        str(BIN / "pip-audit"),
        "--local",
        "--progress-spinner=off",
        "--format=json",
        f"--vulnerability-service={source}",
    ]
    try:
        return looked_at(subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False).stdout)
    except subprocess.TimeoutExpired:
        return None


def looked_at(report: str) -> list[dict[str, Any]] | None:
    """The dependencies in pip-audit's report that its source knew of; None where it knew of none."""
    try:
        found: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, LookupError):
        return None
    return [its for its in found if UNREACHABLE not in its.get("skip_reason", "")] or None


def unanswered(dependencies: list[dict[str, Any]], answers: Mapping[str, str] = ANSWERS) -> list[str]:
    """One line for each finding that has no answer."""
    return [
        f"{its['name']} {its['version']}: {weakness['id']}, mended in {', '.join(weakness['fix_versions']) or 'no version'}"
        for its in dependencies
        for weakness in its.get("vulns", [])
        if not {weakness["id"], *weakness.get("aliases", [])} & set(answers)
    ]


def main() -> int:
    """1 when something is found that has no answer."""
    for source in SOURCES:
        dependencies = audit(source)
        if dependencies is None:
            print(f"skipped: the advisories of {source} cannot be reached")
            continue
        lines = unanswered(dependencies)
        print("\n".join(lines) or f"{source}: nothing known of {len(dependencies)} packages")
        return 1 if lines else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
