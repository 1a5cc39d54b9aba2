"""MkDocs hooks of the documentation site. The README is the first page, and benchmarks/README.md the page of figures.

Other links out of docs/ become plain text.

A page that would load anything from another host is a warning, which ends the strict build.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README_MARK = "<!-- README -->"
FIGURES_MARK = "<!-- figures -->"
LOADED = re.compile(r"""<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+rel="stylesheet"[^>]+href="https?:""")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page's text as the site shows it."""
    if README_MARK in markdown:
        markdown = markdown.replace(README_MARK, readme_as_page((ROOT / "README.md").read_text()))
    if FIGURES_MARK in markdown:
        figures = (ROOT / "benchmarks" / "README.md").read_text()
        markdown = re.sub(r"\]\((\.\./docs/)?", lambda link: "](" if link[1] else "](../benchmarks/", figures)
    return _without_links_outside(markdown.replace("](../benchmarks/README.md", "](figures.md"))


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Check a written page."""
    if found := LOADED.search(output):
        logging.getLogger("mkdocs.hooks").warning("%s loads from another host: %s", page.url, found[0])
    return output


def readme_as_page(readme: str) -> str:
    """Return the README with links relative to docs/."""
    linked = readme.replace("](docs/", "](").replace("](benchmarks/README.md", "](figures.md")
    return re.sub(r"^\| `docs/([\w-]+)\.md` \|", r"| [\1](\1.md) |", linked, flags=re.MULTILINE)


def _without_links_outside(markdown: str) -> str:
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
