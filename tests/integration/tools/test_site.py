"""The documentation site: the README is its first page, every page is in its navigation, nothing is loaded from elsewhere."""

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


def test_the_first_page_is_the_readme_with_links_to_the_others(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert "Run it on two machines" in page
    assert {"security.html", "deploy.html", "configuration.html"} <= set(re.findall(r'href="([\w-]+\.html)"', page))
    assert "docs/security.md" not in page


def test_every_page_is_in_the_navigation(site: Path) -> None:
    linked = set(re.findall(r'href="([\w-]+\.html)"', (site / "index.html").read_text()))
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} - {"index.html"} <= linked


LOADS = re.compile(
    r"""<(?:script|img|iframe)[^>]+src="(https?:[^"]+)"|<link[^>]+rel="stylesheet"[^>]+href="(https?:[^"]+)\""""
)


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    assert LOADS.search('<script async src="https://example.org/x.js">')
    assert {page.name: found for page in site.glob("*.html") if (found := LOADS.findall(page.read_text()))} == {}
