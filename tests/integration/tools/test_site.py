"""The documentation site: first page, navigation, and no external resources."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.reference_tables import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    mkdocs = str(Path(sys.executable).parent / "mkdocs")
    built = subprocess.run(
        [mkdocs, "build", "--strict", "--site-dir", str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return directory


def test_first_page_is_the_readme_with_links_to_other_pages(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert "Run it on two machines" in page
    assert {"security.html", "deploy.html", "configuration.html"} <= set(re.findall(r'href="([\w-]+\.html)"', page))
    assert "docs/security.md" not in page


def test_navigation_lists_every_page(site: Path) -> None:
    linked = set(re.findall(r'href="([\w-]+\.html)"', (site / "index.html").read_text()))
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} - {"index.html"} <= linked


LOADS = re.compile(
    r"""<(?:script|img|iframe)[^>]+src="(https?:[^"]+)"|<link[^>]+rel="stylesheet"[^>]+href="(https?:[^"]+)\""""
)


def test_pages_load_no_external_resources(site: Path) -> None:
    assert LOADS.search('<script async src="https://example.org/x.js">')
    assert {page.name: found for page in site.glob("*.html") if (found := LOADS.findall(page.read_text()))} == {}
