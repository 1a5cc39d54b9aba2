"""MkDocs hooks of the documentation site. The README is the first page; links out of docs/ become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README_MARK = "<!-- README -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page's text as the site shows it."""
    if README_MARK in markdown:
        markdown = markdown.replace(README_MARK, readme_as_page((ROOT / "README.md").read_text()))
    return _without_links_outside(markdown)


def readme_as_page(readme: str) -> str:
    """Return the README with links relative to docs/."""
    linked = re.sub(r"\]\(docs/", "](", readme)
    return re.sub(r"^\| `docs/([\w-]+)\.md` \|", r"| [\1](\1.md) |", linked, flags=re.MULTILINE)


def _without_links_outside(markdown: str) -> str:
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
