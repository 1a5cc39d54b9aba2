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


# Topics that readers look for, with the page and the heading if the topic is part of a page.
TOPICS = {
    "start here": "index#try-it",
    "two machines": "index#run-it-on-two-machines",
    "glossary": "glossary",
    "the two routes": "architecture#life-of-a-request",
    "Kubernetes": "kubernetes",
    "behind llm-d": "gateway#endpoint-picker",
    "beside LMCache or Mooncake": "beside-others",
    "tune a long link": "transport#what-you-can-set",
    "plan capacity": "solver",
    "operate": "console#the-doctor",
    "upgrade": "deploy#upgrading",
    "troubleshoot by symptom": "troubleshoot",
    "metrics": "metrics",
    "configuration": "configuration",
    "wire format": "wire-format",
    "security": "security#threats",
    "design": "architecture",
    "ADRs": "decisions",
}


@pytest.mark.parametrize("topic", TOPICS)
def test_each_topic_has_its_page(site: Path, topic: str) -> None:
    page, _, heading = TOPICS[topic].partition("#")
    text = (site / f"{page}.html").read_text()
    assert f'href="{page}.html' in (site / "index.html").read_text() or page == "index"
    assert f'id="{heading}"' in text if heading else "<h1" in text


LOADS = re.compile(
    r"""<(?:script|img|iframe)[^>]+src="(https?:[^"]+)"|<link[^>]+rel="stylesheet"[^>]+href="(https?:[^"]+)\""""
)


def test_pages_load_no_external_resources(site: Path) -> None:
    assert LOADS.search('<script async src="https://example.org/x.js">')
    assert {page.name: found for page in site.glob("*.html") if (found := LOADS.findall(page.read_text()))} == {}
